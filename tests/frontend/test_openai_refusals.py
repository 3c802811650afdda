"""The OpenAI dialect: refusals in its envelope, for any body."""

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


OF_A_PROMPT: list[tuple[str, Any, str]] = [  # field, value, what the message says
    ("n", 9, "the limit is 8 (max_n)"),
    ("n", 0, "n is 0"),
    ("max_tokens", -1, "max_tokens is -1"),
    ("temperature", 200, "temperature is 200"),
    ("temperature", "1", "temperature is '1'"),
    ("top_k", -2, "top_k is -2"),
    ("top_p", 0, "top_p is 0"),
    ("logprobs", 6, "the limit is 5 (max_logprobs)"),
    ("logprobs", -1, "logprobs is -1"),
    ("logprobs", "1", "logprobs is '1'"),
    ("prompt_logprobs", 6, "the limit is 5"),
    (
        "prompt_logprobs",
        -1,
        "-1, which is all 300 of the vocabulary; the limit is 5 (max_logprobs)",
    ),
    ("prompt_logprobs", -2, "prompt_logprobs is -2"),
    ("stop", ["a", "b", "c"], "the limit is 2 (max_stop_strings)"),
    ("stop_token_ids", [300], "end at 299"),
    ("logit_bias", {"300": 1}, "the key '300'"),
    ("seed", 2**64, "seed is 18446744073709551616"),
    ("stream", 1, "stream is 1"),
    ("stream_options", 1, "stream_options is 1"),
    ("cache_salt", "x" * 300, "cache_salt is"),
]
OF_MESSAGES: list[tuple[str, Any, str]] = [
    ("top_logprobs", 2, "set logprobs to true"),
    ("tools", [1], "tools[0] is 1"),
    ("chat_template_kwargs", {"enable_thinking": {}}, "chat_template_kwargs.enable"),
    ("max_completion_tokens", -1, "max_completion_tokens is -1"),
]
PROMPTS: list[tuple[Any, str]] = [
    (None, "prompt is missing"),
    (5, "prompt is 5"),
    ([], "at least 1 item"),
    ("", "prompt[0] has an empty prompt"),
    ([[65], []], "prompt[1] has an empty prompt"),
    ([1, "a"], "prompt[1] is 'a'"),
    (["a", 1], "prompt[1] is 1"),
    ([[1], "a"], "prompt[1] is 'a'"),
    ([True], "prompt[0] is True"),
    ([-1], "prompt[0] is -1"),
    ([300], "end at 299"),
    ("x" * 600, "the limit is 511"),
]
TALKS: list[tuple[Any, str]] = [
    ([], "at least 1 item"),
    (["a"], "messages[0] is 'a'"),
    ([{"content": "a"}], "messages[0].role is missing"),
    ([{"role": "user", "content": 5}], "messages[0].content is 5"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "image_url"),
    ([{"role": "user", "content": "x" * 600}], "the limit is 511"),
]
TOO_MANY_LOGPROBS = {"messages": USER, "logprobs": True, "top_logprobs": 9}
BAD: list[tuple[str, Any, int, str | None, str]] = [  # path, body, status, param, says
    (COMPLETIONS, b"{", 400, None, "not JSON"),
    (COMPLETIONS, b"[]", 400, None, "JSON object with the field prompt"),
    (COMPLETIONS, {}, 400, "prompt", "prompt is missing"),
    (COMPLETIONS, {"prompt": ["a"] * 5}, 413, "prompt", "the limit is 4 (max_batch_items)"),
    (COMPLETIONS, {"prompt": "a", "model": "other"}, 404, "model", "this server serves 'tiny'"),
    (CHAT, {}, 400, "messages", "messages is missing"),
    (CHAT, TOO_MANY_LOGPROBS, 400, "top_logprobs", "top_logprobs is 9; the limit is 5"),
    ("/tokenize", {}, 400, "prompt", "exactly one"),
    ("/tokenize", {"prompt": "a", "messages": USER}, 400, "prompt", "exactly one"),
    ("/v1/none", {}, 404, None, "there is no /v1/none"),
    ("/detokenize", {"tokens": "a"}, 400, "tokens", "tokens is 'a'"),
    ("/detokenize", {"tokens": [300]}, 400, "tokens", "end at 299"),
    *((COMPLETIONS, {"prompt": prompt}, 400, "prompt", says) for prompt, says in PROMPTS),
    *((CHAT, {"messages": messages}, 400, "messages", says) for messages, says in TALKS),
    *(
        (COMPLETIONS, {"prompt": "a", name: value}, 400, name, says)
        for name, value, says in OF_A_PROMPT
    ),
    *(
        (CHAT, {"messages": USER, name: value}, 400, name, says)
        for name, value, says in OF_MESSAGES
    ),
]


@pytest.mark.parametrize(("path", "body", "status", "param", "says"), BAD, ids=range(len(BAD)))
def test_bad_openai_requests_are_refused_in_the_openai_envelope(
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


def test_a_failed_item_ends_the_request_whole_and_streamed(server: LiveServer) -> None:
    body = {"prompt": [[65], [FAILS]], "max_tokens": 300}
    response = post(server, COMPLETIONS, **body)
    assert (response.status_code, response.json()["error"]["code"]) == (500, "engine_failed")
    last = chunks(server, COMPLETIONS, **body)[-1]
    assert last["error"]["type"] == "server_error" and last["error"]["message"] == "out of luck"


def test_early_refusals_of_openai_routes_use_the_openai_envelope(model: Path) -> None:
    with live_server(model, keys="secret\n", max_body_mb=1) as server:
        assert post(server, COMPLETIONS).json()["error"]["type"] == "authentication_error"
        assert post(server, "/generate").json()["error"].keys() == {"code", "message", "retryable"}
        authorized = {"authorization": "Bearer secret"}
        large = httpx.post(server.url + CHAT, content=b" " * 2**21, headers=authorized)
        assert (large.status_code, large.json()["error"]["type"]) == (413, "invalid_request_error")
        wrong = httpx.get(server.url + CHAT, headers=authorized)
        assert (wrong.status_code, wrong.json()["error"]["type"]) == (405, "invalid_request_error")
        server.call(lambda: setattr(server.client, "draining", True))
        away = httpx.post(server.url + CHAT, json={"messages": USER}, headers=authorized)
        assert (away.status_code, away.json()["error"]["type"]) == (503, "server_error")
        assert away.headers["retry-after"]


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
