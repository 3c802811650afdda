"""No field that changes tokens is swallowed: each field that other servers know is done, refused by
name, or changes nothing.
"""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.frontend.field_tables import PAGES, STRUCTS, entries, pages, table
from tests.frontend.live_server import LiveServer
from tests.frontend.openai_calls import USER, server
from tlt_server.frontend.dialects.known_fields import (
    CHAT,
    COMPLETIONS,
    SGLANG,
    SGLANG_SAMPLING,
    TOKENIZE,
    VLLM,
    VLLM_SAMPLING,
    each,
)
from tlt_server.frontend.http.fields import RefusedField

__all__ = ["server"]  # a fixture

ROUTES = {
    COMPLETIONS: "/v1/completions",
    CHAT: "/v1/chat/completions",
    TOKENIZE: "/tokenize",
    VLLM: "/inference/v1/generate",
    VLLM_SAMPLING: "/inference/v1/generate",
    SGLANG: "/generate",
    SGLANG_SAMPLING: "/generate",
}
SAMPLING = {VLLM_SAMPLING, SGLANG_SAMPLING}
LENGTH = {SGLANG: "max_new_tokens", SGLANG_SAMPLING: "max_new_tokens"}
BASES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "hi"},
    CHAT: {"messages": USER},
    TOKENIZE: {"messages": USER},
    VLLM: {"token_ids": [104, 105]},
    VLLM_SAMPLING: {"token_ids": [104, 105]},
    SGLANG: {"text": "hi"},
    SGLANG_SAMPLING: {"text": "hi"},
}
REFUSED = [
    (body, name, verdict) for body, name, verdict in each() if isinstance(verdict, RefusedField)
]
IGNORED = [(body, name) for body, name, verdict in each() if not isinstance(verdict, RefusedField)]


def send(server: LiveServer, body: str, **fields: Any) -> httpx.Response:
    """Send a body with further fields, which for sampling stand in `sampling_params`."""
    length = LENGTH.get(body, "max_tokens")
    sampling: dict[str, Any] = {length: 4, "seed": 7}
    if body in (SGLANG, SGLANG_SAMPLING):
        sampling = {length: 4, "sampling_seed": 7}
    content = dict(BASES[body])
    if body in (COMPLETIONS, CHAT):
        content |= sampling | fields
    elif body in SAMPLING:
        content["sampling_params"] = sampling | fields
    elif body == TOKENIZE:
        content |= fields
    else:
        content |= {"sampling_params": sampling, **fields}
    return httpx.post(server.url + ROUTES[body], json=content, timeout=20)


def submitted(server: LiveServer, body: str, **fields: Any) -> Any:
    """Return what the engine gets; of a text that is only tokenised, the tokens."""
    response = send(server, body, **fields)
    assert response.status_code == 200, response.text
    if body == TOKENIZE:
        return response.json()["tokens"]
    request = server.engine.submitted[-1]
    return request.sampling, [*request.token_ids], request.seed


@pytest.mark.parametrize(("body", "name", "verdict"), REFUSED, ids=lambda value: str(value)[:40])
def test_a_field_that_would_change_the_answer_is_refused_by_name(
    server: LiveServer, body: str, name: str, verdict: RefusedField
) -> None:
    before = len(server.engine.submitted)
    response = send(server, body, **{name: "other"})
    assert response.status_code == 400 and len(server.engine.submitted) == before
    path = f"sampling_params.{name}" if body in SAMPLING else name
    error = response.json()["error"]
    assert error["message"] == f"{path} is 'other'; {verdict.why}"
    if body in (COMPLETIONS, CHAT, TOKENIZE):
        assert error["param"] == name and error["type"] == "invalid_request_error"
    base = submitted(server, body)
    for off in (None, *verdict.off):
        assert submitted(server, body, **{name: off}) == base


@pytest.mark.parametrize(("body", "name"), IGNORED)
def test_a_field_that_is_ignored_changes_neither_prompt_nor_sampling(
    server: LiveServer, body: str, name: str
) -> None:
    base = submitted(server, body)
    for value in (True, "other", {"a": [1]}):
        assert submitted(server, body, **{name: value}) == base


def test_a_value_that_only_looks_like_off_is_refused(server: LiveServer) -> None:
    for value in (0, {"type": "text", "more": 1}, [[]], {"type": "json_object"}, "x" * 10**5):
        response = send(server, CHAT, response_format=value)
        assert response.status_code == 400, value
        assert len(response.json()["error"]["message"]) < 300
    huge = httpx.post(
        server.url + ROUTES[CHAT],
        content=b'{"messages":[{"role":"user","content":"a"}],"tool_choice":' + b"9" * 200 + b"}",
    )
    assert huge.status_code == 400 and "tool_choice is" in huge.text


@pytest.mark.parametrize("page", PAGES)
def test_every_field_has_one_verdict(page: str) -> None:
    for body in PAGES[page]:
        assert len(entries(body)) >= len(STRUCTS[body].__struct_fields__)
    assert table(page).count("\n") == 5


def test_the_pages_have_the_tables() -> None:
    for path, text in pages():
        assert path.read_text() == text, "run python -m tests.frontend.field_tables"
