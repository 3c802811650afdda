"""The tables of fields on the dialects' pages, and the list of the fields that all dialects share:
`python -m tests.frontend.field_tables` writes them again, and a test compares.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from tlt_client.fields import SharedSampling
from tlt_server.frontend.dialects.known_fields import (
    CHAT,
    COMPLETIONS,
    RESPONSES,
    SGLANG,
    SGLANG_SAMPLING,
    TOKENIZE,
    VLLM,
    VLLM_SAMPLING,
    each,
)
from tlt_server.frontend.dialects.openai.requests import (
    ChatRequest,
    CompletionRequest,
    TokenizeRequest,
)
from tlt_server.frontend.dialects.openai.responses.requests import ResponseRequest
from tlt_server.frontend.dialects.sglang.requests import GenerateFields, SglangSampling
from tlt_server.frontend.dialects.vllm_rl.generate import TokensRequest, VllmSampling
from tlt_server.frontend.http.fields import RefusedField

DOCS = Path(__file__).parents[2] / "docs"
STRUCTS: dict[str, type[Struct]] = {
    COMPLETIONS: CompletionRequest,
    CHAT: ChatRequest,
    TOKENIZE: TokenizeRequest,
    RESPONSES: ResponseRequest,
    VLLM: TokensRequest,
    VLLM_SAMPLING: VllmSampling,
    SGLANG: GenerateFields,
    SGLANG_SAMPLING: SglangSampling,
}
PAGES = {
    "openai": (COMPLETIONS, CHAT, TOKENIZE, RESPONSES),
    "vllm_rl": (VLLM, VLLM_SAMPLING),
    "sglang": (SGLANG, SGLANG_SAMPLING),
}
BLOCK = re.compile(r"(?<=<!--fields-->\n).*?(?=<!--/fields-->)", re.DOTALL)
SHARED = SharedSampling.__struct_fields__
SHARED_BLOCK = re.compile(r"(?<=<!--shared-->).*?(?=<!--/shared-->)")
SHARED_LINK = "the sampling fields that [all dialects share](trainers.md#asking)"

VERDICTS = ("done", "refused", "ignored")


def entries(body: str) -> dict[str, str]:
    """Return the verdict on each field of a body."""
    done, refused, ignored = VERDICTS
    found = dict.fromkeys(STRUCTS[body].__struct_fields__, done)
    for where, name, verdict in each():
        if where == body:
            assert name not in found, f"{body} has two verdicts on {name}"
            found[name] = refused if isinstance(verdict, RefusedField) else ignored
    return found


def spelled(name: str) -> str:
    """Return what a table says in place of a field."""
    return SHARED_LINK if name in SHARED else f"`{name}`"


def table(page: str) -> str:
    """Return the rows verdict x bodies, each with its fields. A field that all of the bodies that
    have it treat alike stands once, without naming them; shared fields stand elsewhere.
    """
    bodies = {body: entries(body) for body in PAGES[page]}
    rows = {(verdict, "everywhere"): list[str]() for verdict in VERDICTS}
    for name in dict.fromkeys(name for known in bodies.values() for name in known):
        found = {body: known[name] for body, known in bodies.items() if name in known}
        for verdict in dict.fromkeys(found.values()):
            alike = [body for body, each in found.items() if each == verdict]
            where = "everywhere" if len(alike) == len(found) else ", ".join(alike)
            rows.setdefault((verdict, where), []).append(spelled(name))
    ordered = sorted(rows.items(), key=lambda row: VERDICTS.index(row[0][0]))
    lines = [
        f"| {' | '.join(row)} | {', '.join(dict.fromkeys(names))} |\n" for row, names in ordered
    ]
    return "".join(["| verdict | where | fields |\n|---|---|---|\n", *lines])


def pages() -> Iterator[tuple[Path, str]]:
    """Yield each page, and its text with the table as it should be."""
    for page in PAGES:
        path = DOCS / f"{page}.md"
        yield path, BLOCK.sub(lambda _: table(page), path.read_text(), count=1)  # noqa: B023
    path, names = DOCS / "trainers.md", ", ".join(f"`{name}`" for name in SHARED)
    yield path, SHARED_BLOCK.sub(names, path.read_text(), count=1)


if __name__ == "__main__":
    for path, text in pages():
        path.write_text(text)
