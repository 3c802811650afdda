"""Journals that no server wrote: each ends with results or with a named reason, never `internal`,
and the engine gets nothing that it could not have been asked for.
"""

import hashlib
import math
import zlib
from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any, get_args, get_type_hints

import httpx
import msgspec
import pytest

from tests.frontend.live_server import live_server
from tests.unit.test_journal import HEADER, OUTPUTS
from tlt_server.frontend.rollouts.journal import FORMAT, Record, RolloutEnd, past
from tlt_server.frontend.rollouts.rollout import flaw
from tlt_server.wire.packed import PackedIds
from tlt_server.wire.records import Grammar, TokenLogprobs

VALUES: tuple[Any, ...] = (
    -1,
    0,
    1,
    2**31,
    2**64 - 1,
    -(2**63),
    math.nan,
    math.inf,
    -1e300,
    "",
    "x" * 300,
    [],
    [-1],
    [2**31],
    {},
    None,
    b"abc",
)


def framed(content: Any) -> bytes:
    payload = msgspec.msgpack.encode(content)
    length = len(payload).to_bytes(4, "little")
    return length + zlib.crc32(payload, zlib.crc32(length)).to_bytes(4, "little") + payload


def forgeries(content: Any) -> Iterator[Any]:
    """Yield `content` with each place in it given each other value, doubled or left out."""
    if isinstance(content, dict | list):
        places = [*content] if isinstance(content, dict) else range(len(content))
        for place in places:
            for other in [*forgeries(content[place]), *VALUES]:
                yield (
                    {**content, place: other}
                    if isinstance(content, dict)
                    else [*content[:place], other, *content[place + 1 :]]
                )
            without = deepcopy(content)
            del without[place]
            yield without
        if isinstance(content, list) and content:
            yield [*content, content[0]]


@pytest.fixture(scope="module")
def written(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[Any]]:
    """The header and the outputs of a real journal, of two items with log-probs and a stop."""
    state = tmp_path_factory.mktemp("written")
    with live_server(model, state_dir=state) as server:
        item = {"prompt": "abc", "n": 2, "seed": 5, "id": "a"}
        sampling = {"max_tokens": 3, "stop": ["zz"], "logprobs": 1, "prompt_logprobs": 1}
        body = {"requests": [item, {"token_ids": [65], "id": "b"}], "sampling": sampling}
        reply = httpx.post(f"{server.url}/generate", json={**body, "detach": True})
        httpx.get(f"{server.url}/rollouts/{reply.json()['id']}?wait_s=20", timeout=30)
    (file,) = (state / "rollouts").glob("*.journal")
    said = past(file.read_bytes())
    assert said is not None and said.end is not None
    header = msgspec.msgpack.decode(msgspec.msgpack.encode(said.header))
    return header, msgspec.msgpack.decode(msgspec.msgpack.encode(said.outputs))


def journals(header: Any, outputs: list[Any], every: int) -> Iterator[list[bytes]]:
    """Yield the records of forged journals, some that run on and some that are done."""
    end = framed(RolloutEnd(2e9, 3))
    for i, forged in enumerate(forgeries({"header": header, "outputs": outputs})):
        if i % every == 0 and isinstance(forged.get("header"), dict):
            head, grown = forged["header"], forged.get("outputs")
            for after in ([], [end]):
                cut = grown[:-1] if isinstance(grown, list) and not after else grown
                yield [head, {"type": "grown", "outputs": cut}, *after]


def test_a_forged_journal_ends_with_a_named_reason(
    model: Path, tmp_path: Path, written: tuple[Any, list[Any]]
) -> None:
    """Delete those that run on for their deadline, since their requests are sound."""
    directory = tmp_path / "rollouts"
    directory.mkdir()
    ids = []
    for number, records in enumerate(journals(*written, every=37)):
        id, head = f"r-{number}", records[0]
        head |= {"id": id} if isinstance(head.get("id"), str) else {}
        whole = [each if isinstance(each, bytes) else framed(each) for each in [head, *records[1:]]]
        (directory / f"{id}.journal").write_bytes(b"".join(whole))
        ids.append(id)
    codes = Counter[str]()
    with live_server(model, state_dir=tmp_path, max_rollouts=len(ids)) as server:
        with httpx.Client(base_url=server.url, timeout=30) as http:
            for id in ids:
                body = http.get(f"/rollouts/{id}", params={"wait_s": 0.05}).json()
                errors = [body] if body.get("error") else body.get("results") or []
                for error in (each["error"] for each in errors if each.get("error")):
                    codes[error["code"]] += 1
                    assert error["code"] != "internal", (error, id)
                http.delete(f"/rollouts/{id}")
            assert http.get("/readyz").status_code == 200
    assert codes["storage_failed"] and codes["not_found"], codes


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"id": "another"}, "an output is of a sequence that the request does not have"),
        ({"logprobs": []}, "an output has more tokens than log-probs"),
        ({"token_ids": [-1, 2]}, "an output holds what is no token id"),
        ({"accepted": 9}, "an output accepts more than was drafted"),
        ({"top_logprobs": [TokenLogprobs([1, 2], [-1.0])] * 2}, "alternatives without log-probs"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_journal_error_names_the_impossible_record(change: dict[str, Any], reason: str) -> None:
    assert flaw(HEADER, OUTPUTS) == ""
    assert reason in flaw(HEADER, [msgspec.structs.replace(OUTPUTS[0], **change)])


def test_records_of_a_journal_have_the_fields_of_its_format() -> None:
    """Raise FORMAT together with the digest."""
    found: dict[str, str] = {}
    kinds: list[Any] = [Record]
    while kinds:
        kind = kinds.pop()
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            if kind.__name__ not in found:
                fields = get_type_hints(kind)
                found[kind.__name__] = " ".join(sorted(kind.__struct_encode_fields__))
                kinds += [fields[name] for name in kind.__struct_fields__]
        kinds += get_args(kind)
    fields = "\n".join(f"{name}: {found[name]}" for name in sorted(found))
    assert {"Grammar", "TokenLogprobs", "Fingerprint", "PackedIds"} <= found.keys()
    assert (FORMAT, hashlib.sha256(fields.encode()).hexdigest()[:8]) == (7, "c4a934d3"), fields


def test_journal_of_a_later_format_is_refused_by_number() -> None:
    for format in (0, FORMAT + 1):
        other = msgspec.structs.replace(HEADER, format=format)
        says = f"its format is {format}, and this server's is {FORMAT}"
        assert flaw(other, OUTPUTS) == says
    assert flaw(msgspec.structs.replace(HEADER, format=1), OUTPUTS) == ""


def test_journal_with_an_impossible_prompt_is_refused_by_reason() -> None:
    (item,) = HEADER.items
    request = item.requests[0]
    hot = msgspec.structs.replace(request.sampling, temperature=math.nan)
    endless = Grammar(kind="json_schema", text='{"multipleOf": 1000000007}')
    slow = msgspec.structs.replace(request.sampling, structured_outputs=endless)
    for changed, reason in (
        (
            {"requests": [msgspec.structs.replace(request, sampling=slow)]},
            "a sequence has bad words, biases or a structure that no request can have",
        ),
        ({"token_ids": [-5]}, "a prompt is empty or holds what is no token id"),
        ({"token_ids": PackedIds(b"abc")}, "a prompt has a part of a token id"),
        ({"requests": []}, "an item has no choices"),
        ({"requests": [request, request]}, "two of its items or sequences have one id"),
        (
            {"requests": [msgspec.structs.replace(request, sampling=hot)]},
            "a sequence has a sampling that no request can have: Expected `float` >= 0.0 - at "
            "`$.temperature`",
        ),
    ):
        forged = msgspec.structs.replace(item, **changed)
        assert flaw(msgspec.structs.replace(HEADER, items=[forged]), []) == reason
