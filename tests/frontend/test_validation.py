"""Bad requests: each is one typed 4xx that names value, limit and remedy, and never reaches the
engine.
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.frontend.fake_engine import HANGS
from tests.frontend.live_server import LiveServer, live_server
from tests.waiting import until


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[LiveServer]:
    limits = {
        "max_batch_items": 4,
        "max_n": 8,
        "max_batch_prompt_tokens": 3000,
        "max_batch_output_tokens": 4000,
        "max_queue": 20,
        "max_stop_strings": 2,
        "max_stop_chars": 10,
        "max_stop_token_ids": 3,
        "max_logprobs": 5,
        "max_logit_bias": 2,
        "max_timeout_s": 100,
        "default_timeout_s": 50,
    }
    with live_server(model, **limits) as running:
        yield running


def item(**fields: Any) -> dict[str, Any]:
    return {"requests": [{"prompt": "abc", **fields}]}


def sampling(**fields: Any) -> dict[str, Any]:
    return {"requests": [{"prompt": "abc"}], "sampling": fields}


BAD = [  # (body, status, what the message must say)
    (b"", 400, "not JSON"),
    (b"{", 400, "not JSON"),
    (b'{"requests": []} trailing', 400, "not JSON"),
    (b'\xff\xfe{"requests": 1}', 400, "not JSON"),
    (b'{"requests": [{"prompt": "\\ud800"}]}', 400, "not JSON"),
    (b'{"requests": [{"prompt": "a"}], "sampling": {"temperature": NaN}}', 400, "not JSON"),
    (b"[" * 100_000, 400, "not JSON"),
    (b"[]", 400, "must be a JSON object"),
    (b'"requests"', 400, "must be a JSON object"),
    (b"null", 400, "must be a JSON object"),
    ({}, 400, "requests is missing; give requests, or, as SGLang's clients do, text or input_ids"),
    ({"text": None}, 400, "requests is missing"),
    ({"requests": []}, 400, "requests is []; it must have at least 1 item"),
    (item(id="x" * 300), 400, "it must have at most 256 characters"),
    (item(id=""), 400, "id is ''; it must have at least 1 character"),
    (item(sampling=5), 400, "requests[0].sampling is 5; it must be an object"),
    (sampling(logit_bias=[]), 400, "sampling.logit_bias is []; it must be an object"),
    (item(n=[]), 400, "n is []; it must be a whole number"),
    (item(n=2.5), 400, "n is 2.5; it must be a whole number"),
    (sampling(temperature=[]), 400, "temperature is []; it must be a number"),
    (item(sd="yes"), 400, "sd is 'yes'; it must be 'auto' or 'off'"),
    (item(sd=7), 400, "sd is 7; it must be true or false or 'auto' or 'off' or an object"),
    (item(sd={"depth": 2}), 400, "unknown field requests[0].sd.depth; did you mean max_depth"),
    (item(sd={"max_depth": 65}), 400, "requests[0].sd.max_depth is 65; it must be at most 64"),
    (item(sd={"max_rows": 1}), 400, "requests[0].sd.max_rows is 1; it must be at least 2"),
    (item(sd={"drafter": "medusa"}), 400, "requests[0].sd.drafter is 'medusa'; loaded: none"),
    (sampling(temperature=101), 400, "temperature is 101; it must be at most 100"),
    (sampling(top_p=0), 400, "top_p is 0; it must be greater than 0"),
    (sampling(top_p=-1), 400, "top_p is -1; it must be greater than 0"),
    (item(n=0), 400, "n is 0; it must be at least 1"),
    ({"requests": {}}, 400, "requests is {}; it must be a list"),
    ({"requests": ["abc"]}, 400, "requests[0] is 'abc'; it must be an object"),
    ({"requests": None}, 400, "requests is missing; give requests, or, as SGLang's"),
    (item() | {"text": "hi"}, 400, "send one"),
    ({"text": "hi", "input_ids": [1]}, 400, "give exactly one"),
    ({"requests": [{"prompt": "a"}] * 5}, 413, "the limit is 4 (max_batch_items)"),
    ({"request": [{"prompt": "a"}]}, 400, "requests"),
    (item() | {"steam": True}, 400, "did you mean stream"),
    (item(promt="x"), 400, "did you mean prompt"),
    (
        item(sampling={"temprature": 1}),
        400,
        "requests[0].sampling.temprature; did you mean temperature",
    ),
    (sampling(max_token=3), 400, "sampling.max_token; did you mean max_tokens"),
    (item() | {"stream": 1}, 400, "stream is 1"),
    (item() | {"stream": "true"}, 400, "stream is 'true'"),
    (item() | {"timeout_s": 0}, 400, "timeout_s is 0"),
    (item() | {"timeout_s": -1.5}, 400, "timeout_s is -1.5"),
    (item() | {"timeout_s": 101}, 400, "the limit is 100 s"),
    (b'{"requests": [{"prompt": "a"}], "timeout_s": 1e400}', 400, "timeout_s is 1e400"),
    ({"requests": [{}]}, 400, "exactly one of"),
    (item(token_ids=[1]), 400, "prompt and token_ids"),
    ({"requests": [{"prompt": ""}]}, 400, "empty prompt"),
    ({"requests": [{"token_ids": []}]}, 400, "empty prompt"),
    ({"requests": [{"token_ids": [1, 300]}]}, 400, "token id 300; ids of this model end at 299"),
    ({"requests": [{"token_ids": [-1]}]}, 400, "token_ids[0] is -1"),
    ({"requests": [{"token_ids": [True]}]}, 400, "token_ids[0] is True"),
    ({"requests": [{"token_ids": [1.5]}]}, 400, "token_ids[0] is 1.5"),
    ({"requests": [{"token_ids": ["1"]}]}, 400, "token_ids[0] is '1'"),
    ({"requests": [{"token_ids": [2**70]}]}, 400, "token_ids[0] is"),
    ({"requests": [{"token_ids": [1] * 512}]}, 400, "the limit is 511"),
    ({"requests": [{"prompt": "x" * 600}]}, 400, "prompt of 600 tokens"),
    (
        {"requests": [{"token_ids": [1]}, {"prompt": "x" * 10000}]},
        400,
        "requests[1] has a text of 10000 characters; the limit is 6643",
    ),
    (
        {"requests": [{"messages": [{"role": "user", "content": "x" * 10000}]}]},
        400,
        "requests[0] has a text of 100",
    ),
    ({"requests": [{"messages": []}]}, 400, "messages"),
    ({"requests": [{"messages": [{"role": "user"}]}]}, 400, "content is missing"),
    ({"requests": [{"messages": [{"role": "user", "content": 5}]}]}, 400, "content is 5"),
    (
        {"requests": [{"messages": [{"role": "user", "content": "a", "contents": "b"}]}]},
        400,
        "did you mean content",
    ),
    (item(n=True), 400, "n is True"),
    (item(n=1.0), 400, "n is 1.0"),
    (item(n="2"), 400, "n is '2'"),
    (item(n=9), 400, "the limit is 8 (max_n)"),
    (item(n=10**30), 400, "n is 1000"),
    (item(seed=-1), 400, "seed is -1"),
    (item(seed=2**64), 400, "seed is 18446744073709551616"),
    (item(seed=False), 400, "seed is False"),
    (item(id=5), 400, "id is 5"),
    ({"requests": [{"id": "a", "prompt": "x"}, {"id": "a", "prompt": "y"}]}, 400, "used twice"),
    (sampling(temperature=-0.1), 400, "temperature is -0.1"),
    (sampling(temperature=1e-9), 400, "use 0 for greedy"),
    (sampling(temperature="hot"), 400, "temperature is 'hot'"),
    (sampling(temperature=True), 400, "temperature is True"),
    (sampling(temperature=None), 400, "temperature is None"),
    (sampling(top_p=1.1), 400, "top_p is 1.1"),
    (sampling(top_k=-1), 400, "top_k is -1"),
    (sampling(min_p=2), 400, "min_p is 2"),
    (sampling(max_tokens=-1), 400, "max_tokens is -1"),
    (sampling(max_tokens=510), 400, "the limit here is 509"),
    (sampling(max_tokens=10**12), 400, "max_tokens is"),
    (sampling(min_tokens=9, max_tokens=8), 400, "min_tokens is 9"),
    (sampling(repetition_penalty=0), 400, "repetition_penalty is 0"),
    (sampling(presence_penalty=3), 400, "presence_penalty is 3"),
    (sampling(frequency_penalty=-3), 400, "frequency_penalty is -3"),
    (sampling(logprobs=6), 400, "the limit is 5 (max_logprobs)"),
    (sampling(prompt_logprobs=-1), 400, "prompt_logprobs is -1"),
    (sampling(stop=["a", "b", "c"]), 400, "the limit is 2 (max_stop_strings)"),
    (sampling(stop=[""]), 400, "empty string"),
    (sampling(stop=""), 400, "empty string"),
    (sampling(stop=5), 400, "sampling.stop is 5"),
    (sampling(stop="x" * 11), 400, "the limit is 10 (max_stop_chars)"),
    (sampling(stop_token_ids=[1, 2, 3, 4]), 400, "the limit is 3"),
    (sampling(stop_token_ids=[300]), 400, "end at 299"),
    (sampling(logit_bias={"1": 1, "2": 1, "3": 1}), 400, "the limit is 2"),
    (sampling(logit_bias={"300": 1}), 400, "the key '300'"),
    (sampling(logit_bias={"01": 1}), 400, "the key '01'"),
    (sampling(logit_bias={"one": 1}), 400, "the key 'one'"),
    (sampling(logit_bias={"1": 101}), 400, "logit_bias.1 is 101"),
    ({"requests": [{"token_ids": [1] * 500, "n": 7}]}, 413, "max_batch_prompt_tokens"),
    (
        {"requests": [{"prompt": "a", "n": 8}] * 2, "sampling": {"max_tokens": 400}},
        413,
        "max_batch_output_tokens",
    ),
    (
        {"requests": [{"prompt": "a", "n": 8}] * 3, "sampling": {"max_tokens": 1}},
        413,
        "the limit is 20 (max_queue)",
    ),
]


@pytest.mark.parametrize(("body", "status", "says"), BAD, ids=range(len(BAD)))
def test_invalid_requests_are_refused_with_a_reason(
    server: LiveServer, body: Any, status: int, says: str
) -> None:
    before = len(server.engine.submitted)
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = httpx.post(f"{server.url}/generate", content=content)
    error = response.json()["error"]
    assert (response.status_code, error["retryable"]) == (status, False)
    assert says in error["message"]
    assert len(error["message"]) < 700
    assert not any(
        raw in error["message"]
        for raw in ("nput should", "after validation", "alue error", "instance of", "valid dict")
    )
    assert len(server.engine.submitted) == before


def test_default_max_tokens_is_what_the_context_leaves(server: LiveServer) -> None:
    response = httpx.post(f"{server.url}/generate", json={"requests": [{"token_ids": [65] * 500}]})
    assert len(response.json()["results"][0]["choices"][0]["token_ids"]) == 12


def test_values_at_their_bounds_are_accepted(server: LiveServer) -> None:
    body = {
        "requests": [{"prompt": "a", "n": 8, "seed": 2**64 - 1 - 8 * 10**6}, {"token_ids": [299]}],
        "timeout_s": 100,
        "sampling": {
            "max_tokens": 1,
            "min_tokens": 1,
            "temperature": 0,
            "top_p": 1,
            "top_k": 0,
            "min_p": 1,
            "logprobs": 5,
            "stop": ["x" * 10, "y"],
            "stop_token_ids": [0, 1, 299],
            "logit_bias": {"0": -100, "299": 100.0},
        },
    }
    assert httpx.post(f"{server.url}/generate", json=body).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        {
            "requests": None,
            "input_ids": None,
            "text": "a",
            "sampling_params": {"max_new_tokens": 1},
        },
        {"requests": [{"prompt": "a"}], "text": None, "sampling": {"max_tokens": 1}},
    ],
)
def test_null_fields_do_not_select_a_form_of_generate(server: LiveServer, body: Any) -> None:
    reply = httpx.post(f"{server.url}/generate", json=body)
    assert reply.status_code == 200 and ("results" in reply.json()) == bool(body["requests"])


def test_batch_over_the_queue_is_refused_before_its_sequences(model: Path) -> None:
    body = json.dumps(
        {"requests": [{"token_ids": [1], "n": 256}] * 4096, "sampling": {"max_tokens": 1}}
    )
    with live_server(model) as server:
        started = time.monotonic()
        response = httpx.post(f"{server.url}/generate", content=body, timeout=60)
        seconds = time.monotonic() - started
    assert response.status_code == 413
    assert "1048576 sequences (items x n); the limit is 8192" in response.json()["error"]["message"]
    assert seconds < 15  # a million records took 35 s


@contextmanager
def untokenised(server: LiveServer) -> Iterator[None]:
    """Fail if a text is tokenised in the block."""
    encoded: list[Any] = []
    server.call(lambda: setattr(server.text, "encode", lambda *given, **_: encoded.append(given)))
    yield
    server.call(lambda: delattr(server.text, "encode"))
    assert encoded == []


def chat(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def test_a_full_queue_refuses_before_tokenising(server: LiveServer) -> None:
    waiting = [{"token_ids": [HANGS], "n": n} for n in (8, 5)]
    waits = {"requests": waiting, "stream": True}
    with httpx.stream("POST", f"{server.url}/generate", json=waits):
        until(lambda: len(server.client) == 13)
        for path, body in (
            ("/generate", {"requests": [{"prompt": "abc", "n": 8}] * 2}),
            ("/generate", {"requests": [{"messages": chat("abc"), "n": 8}] * 2}),
            ("/v1/completions", {"prompt": ["abc"] * 2, "n": 8}),
            ("/v1/chat/completions", {"messages": chat("abc"), "n": 8}),
        ):
            with untokenised(server):
                response = httpx.post(server.url + path, json=body)
            assert response.status_code == 429 and "13 sequences are open" in response.text
    until(lambda: not len(server.client))


def test_overlong_text_is_refused_before_tokenising(server: LiveServer) -> None:
    for path, body, says in (
        ("/v1/completions", {"prompt": ["a", "x" * 10000]}, "prompt[1] has a text of 10000"),
        ("/v1/chat/completions", {"messages": chat("x" * 10000)}, "messages has a text of 100"),
        ("/tokenize", {"prompt": "x" * 10000}, "prompt has a text of 10000 characters"),
        ("/tokenize", {"messages": chat("x" * 10000)}, "messages has a text of 100"),
    ):
        with untokenised(server):
            response = httpx.post(server.url + path, json=body)
        assert response.status_code == 400 and says in response.json()["error"]["message"]
        assert "6643" in response.text and "max_prompt_tokens" in response.text


def test_the_longest_fitting_text_is_tokenised(server: LiveServer) -> None:
    body = {"requests": [{"prompt": "<|assistant|>" * 511}], "sampling": {"max_tokens": 1}}
    assert httpx.post(f"{server.url}/generate", json=body).status_code == 200
