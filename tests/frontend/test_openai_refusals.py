"""The OpenAI dialect: refusals in its envelope, for any body."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.frontend.fake_engine import FAILS
from tests.frontend.live_server import LiveServer, live_server
from tests.frontend.openai_calls import CHAT, COMPLETIONS, USER, chunks, post, server
from tlt_server.frontend.dialects.openai.requests import (
    ChatRequest,
    CompletionRequest,
    TokenizeRequest,
)

__all__ = ["server"]  # a fixture


BAD: list[
    tuple[str, Any, int, str | None, str]
] = [  # path, body, status, param, what the message says
    (COMPLETIONS, b"{", 400, None, "not JSON"),
    (COMPLETIONS, b"[]", 400, None, "JSON object with the field prompt"),
    (COMPLETIONS, {}, 400, "prompt", "prompt is missing"),
    (COMPLETIONS, {"prompt": None}, 400, "prompt", "prompt is missing"),
    (COMPLETIONS, {"prompt": 5}, 400, "prompt", "prompt is 5"),
    (COMPLETIONS, {"prompt": []}, 400, "prompt", "at least 1 item"),
    (COMPLETIONS, {"prompt": ""}, 400, "prompt", "prompt[0] has an empty prompt"),
    (COMPLETIONS, {"prompt": [[65], []]}, 400, "prompt", "prompt[1] has an empty prompt"),
    (COMPLETIONS, {"prompt": [1, "a"]}, 400, "prompt", "prompt[1] is 'a'"),
    (COMPLETIONS, {"prompt": ["a", 1]}, 400, "prompt", "prompt[1] is 1"),
    (COMPLETIONS, {"prompt": [[1], "a"]}, 400, "prompt", "prompt[1] is 'a'"),
    (COMPLETIONS, {"prompt": [True]}, 400, "prompt", "prompt[0] is True"),
    (COMPLETIONS, {"prompt": [-1]}, 400, "prompt", "prompt[0] is -1"),
    (COMPLETIONS, {"prompt": [300]}, 400, "prompt", "end at 299"),
    (COMPLETIONS, {"prompt": "x" * 600}, 400, "prompt", "the limit is 511"),
    (COMPLETIONS, {"prompt": ["a"] * 5}, 413, "prompt", "the limit is 4 (max_batch_items)"),
    (COMPLETIONS, {"prompt": "a", "n": 9}, 400, "n", "the limit is 8 (max_n)"),
    (COMPLETIONS, {"prompt": "a", "n": 0}, 400, "n", "n is 0"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": -1}, 400, "max_tokens", "max_tokens is -1"),
    (COMPLETIONS, {"prompt": "a", "temperature": 200}, 400, "temperature", "temperature is 200"),
    (COMPLETIONS, {"prompt": "a", "temperature": "1"}, 400, "temperature", "temperature is '1'"),
    (COMPLETIONS, {"prompt": "a", "top_k": -2}, 400, "top_k", "top_k is -2"),
    (COMPLETIONS, {"prompt": "a", "top_p": 0}, 400, "top_p", "top_p is 0"),
    (COMPLETIONS, {"prompt": "a", "logprobs": 6}, 400, "logprobs", "the limit is 5 (max_logprobs)"),
    (COMPLETIONS, {"prompt": "a", "logprobs": -1}, 400, "logprobs", "logprobs is -1"),
    (
        CHAT,
        {"messages": USER, "logprobs": True, "top_logprobs": 9},
        400,
        "top_logprobs",
        "top_logprobs is 9; the limit is 5 (max_logprobs)",
    ),
    (COMPLETIONS, {"prompt": "a", "logprobs": "1"}, 400, "logprobs", "logprobs is '1'"),
    (COMPLETIONS, {"prompt": "a", "prompt_logprobs": 6}, 400, "prompt_logprobs", "the limit is 5"),
    (
        COMPLETIONS,
        {"prompt": "a", "prompt_logprobs": -1},
        400,
        "prompt_logprobs",
        "prompt_logprobs is -1, which is all 300 of the vocabulary; the limit is 5 (max_logprobs): "
        "ask for fewer",
    ),
    (
        COMPLETIONS,
        {"prompt": "a", "prompt_logprobs": -2},
        400,
        "prompt_logprobs",
        "prompt_logprobs is -2",
    ),
    (
        COMPLETIONS,
        {"prompt": "a", "stop": ["a", "b", "c"]},
        400,
        "stop",
        "the limit is 2 (max_stop_strings)",
    ),
    (COMPLETIONS, {"prompt": "a", "stop_token_ids": [300]}, 400, "stop_token_ids", "end at 299"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"300": 1}}, 400, "logit_bias", "the key '300'"),
    (COMPLETIONS, {"prompt": "a", "seed": 2**64}, 400, "seed", "seed is 18446744073709551616"),
    (COMPLETIONS, {"prompt": "a", "stream": 1}, 400, "stream", "stream is 1"),
    (
        COMPLETIONS,
        {"prompt": "a", "stream_options": 1},
        400,
        "stream_options",
        "stream_options is 1",
    ),
    (COMPLETIONS, {"prompt": "a", "cache_salt": "x" * 300}, 400, "cache_salt", "cache_salt is"),
    (COMPLETIONS, {"prompt": "a", "model": "other"}, 404, "model", "this server serves 'tiny'"),
    (CHAT, {}, 400, "messages", "messages is missing"),
    (CHAT, {"messages": []}, 400, "messages", "at least 1 item"),
    (CHAT, {"messages": ["a"]}, 400, "messages", "messages[0] is 'a'"),
    (CHAT, {"messages": [{"content": "a"}]}, 400, "messages", "messages[0].role is missing"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": 5}]},
        400,
        "messages",
        "messages[0].content is 5",
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
        400,
        "messages",
        "image_url",
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": "x" * 600}]},
        400,
        "messages",
        "the limit is 511",
    ),
    (CHAT, {"messages": USER, "top_logprobs": 2}, 400, "top_logprobs", "set logprobs to true"),
    (CHAT, {"messages": USER, "tools": [1]}, 400, "tools", "tools[0] is 1"),
    (
        CHAT,
        {"messages": USER, "chat_template_kwargs": {"enable_thinking": {}}},
        400,
        "chat_template_kwargs",
        "chat_template_kwargs.enable",
    ),
    (
        CHAT,
        {"messages": USER, "max_completion_tokens": -1},
        400,
        "max_completion_tokens",
        "max_completion_tokens is -1",
    ),
    ("/tokenize", {}, 400, "prompt", "exactly one"),
    ("/tokenize", {"prompt": "a", "messages": USER}, 400, "prompt", "exactly one"),
    ("/v1/none", {}, 404, None, "there is no /v1/none"),
    ("/detokenize", {"tokens": "a"}, 400, "tokens", "tokens is 'a'"),
    ("/detokenize", {"tokens": [300]}, 400, "tokens", "end at 299"),
]


@pytest.mark.parametrize(("path", "body", "status", "param", "says"), BAD, ids=range(len(BAD)))
def test_bad_requests_are_refused_in_the_envelope(
    server: LiveServer, path: str, body: Any, status: int, param: str | None, says: str
) -> None:
    before = len(server.engine.submitted)
    response = httpx.post(
        server.url + path, content=body if isinstance(body, bytes) else json.dumps(body).encode()
    )
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert says in error["message"] and len(error["message"]) < 700 and error["param"] == param
    kinds = {
        400: ("invalid_request_error", "invalid_request"),
        404: ("not_found_error", "not_found"),
        413: ("invalid_request_error", "too_large"),
    }
    kind, code = kinds[status]
    if "maximum context length is" in says or "the limit is 511" in says:
        assert "this model's maximum context length is 512 tokens" in error["message"]
        code = "context_length_exceeded"
    assert (error["type"], error["code"]) == (kind, code)
    assert len(server.engine.submitted) == before


def test_an_item_that_fails_ends_the_request_whole_and_streamed(server: LiveServer) -> None:
    body = {"prompt": [[65], [FAILS]], "max_tokens": 300}
    response = post(server, COMPLETIONS, **body)
    assert (response.status_code, response.json()["error"]["code"]) == (500, "engine_failed")
    last = chunks(server, COMPLETIONS, **body)[-1]
    assert last["error"]["type"] == "server_error" and last["error"]["message"] == "out of luck"


def test_the_envelope_is_for_these_routes_only_and_also_for_refusals_before_them(
    model: Path, tmp_path: Path
) -> None:
    (tmp_path / "keys").write_text("secret\n")
    with live_server(model, api_key_file=tmp_path / "keys", max_body_mb=1) as server:
        assert post(server, COMPLETIONS).json()["error"]["type"] == "authentication_error"
        assert post(server, "/generate").json()["error"].keys() == {"code", "message", "retryable"}
        authorized = {"authorization": "Bearer secret"}
        large = httpx.post(server.url + CHAT, content=b" " * 2**21, headers=authorized)
        assert (large.status_code, large.json()["error"]["type"]) == (413, "invalid_request_error")
        wrong = httpx.get(server.url + CHAT, headers=authorized)
        assert (wrong.status_code, wrong.json()["error"]["type"]) == (405, "invalid_request_error")
        server.call(lambda: setattr(server.client, "draining", True))
        away = httpx.post(server.url + CHAT, json={"messages": USER}, headers=authorized)
        assert (away.status_code, away.json()["error"]["type"]) == (
            503,
            "server_error",
        ) and away.headers["retry-after"]


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 2**65)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "function", "a"]), inner, max_size=3)
    ),
    max_leaves=6,
)
FIELDS = sorted(
    {
        *CompletionRequest.__struct_fields__,
        *ChatRequest.__struct_fields__,
        *TokenizeRequest.__struct_fields__,
        "tokens",
    }
    - {"max_tokens"}
)


@given(
    path=st.sampled_from([COMPLETIONS, CHAT, "/tokenize", "/detokenize"]),
    valid=st.booleans(),
    fields=st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=4),
)
@settings(max_examples=300, deadline=None, derandomize=True)
def test_any_body_gets_a_reply_or_a_refusal(
    server: LiveServer, path: str, valid: bool, fields: dict[str, Any]
) -> None:
    sound = (
        {"prompt": "a", "messages": USER, "tokens": [65]}
        if path != "/tokenize"
        else {"prompt": "a"}
    )
    response = post(server, path, **{"max_tokens": 2, **(sound if valid else {}), **fields})
    assert response.status_code in (200, 400, 404, 413), response.text
