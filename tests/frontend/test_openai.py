"""The OpenAI dialect against the fake engine: shapes, order, streams that add up to whole replies,
tolerance, typed refusals.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.frontend.fake_engine import EOS, FAILS
from tests.frontend.live_server import LiveServer, live_server
from tlt_client import Client
from tlt_server.frontend.dialects.openai.requests import (
    ChatRequest,
    CompletionRequest,
    TokenizeRequest,
)

USER = [{"role": "user", "content": "hi"}]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
FIGURES = {
    "mean_acceptance_length": 2.5,
    "draft_acceptance_rate": 3 / 6,
    "acceptance_histogram": [0, 1, 1],
    "num_spec_steps": 2,
    "num_accepted_draft_tokens": 3,
    "num_draft_tokens": 6,
    "num_spec_tokens": 2,
}


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[LiveServer]:
    with live_server(
        model,
        served_model_name="tiny",
        max_n=8,
        max_batch_items=4,
        max_logprobs=5,
        max_stop_strings=2,
    ) as running:
        yield running


def post(server: LiveServer, path: str, **body: Any) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=20)


def done(server: LiveServer, path: str, **body: Any) -> dict[str, Any]:
    response = post(server, path, **body)
    assert response.status_code == 200, response.text
    return response.json()


def complete(server: LiveServer, **body: Any) -> dict[str, Any]:
    return done(server, "/v1/completions", **body)


def chat(server: LiveServer, **body: Any) -> dict[str, Any]:
    return done(server, "/v1/chat/completions", **{"messages": USER, **body})


def chunks(server: LiveServer, path: str, **body: Any) -> list[dict[str, Any]]:
    response = post(server, path, stream=True, **body)
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    frames = response.text.strip().split("\n\n")
    assert frames[-1] == "data: [DONE]" and all(frame.startswith("data: ") for frame in frames)
    return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-1]]


def test_models_name_the_served_model_and_its_length(server: LiveServer) -> None:
    [model] = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"], model["object"]) == ("tiny", 512, "model")


def test_a_completion_has_every_field(server: LiveServer) -> None:
    reply = complete(
        server,
        prompt="xyz",
        max_tokens=5,
        logprobs=1,
        return_token_ids=True,
        return_weight_versions=True,
        seed=3,
    )
    assert (reply["object"], reply["model"]) == ("text_completion", "tiny") and reply[
        "id"
    ].startswith("cmpl-")
    [choice] = reply["choices"]
    assert (choice["index"], choice["text"], choice["finish_reason"], choice["stop_reason"]) == (
        0,
        "xyzxy",
        "length",
        None,
    )
    assert choice["token_ids"] == list(b"xyzxy") and choice["prompt_token_ids"] == list(b"xyz")
    assert choice["weight_versions"] == [{"version": "v0", "start": 0, "end": 5}]
    assert choice["metrics"] == reply["metrics"] == {"speculative_decoding": FIGURES}
    assert reply["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 5,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("abc", ["ab"]),
        (["abc", "xyz"], ["ab", "xy"]),
        ([97, 98, 99], ["ab"]),
        ([[97, 98], [120]], ["ab", "xx"]),
    ],
)
def test_a_prompt_has_four_forms(server: LiveServer, prompt: Any, texts: list[str]) -> None:
    assert [
        choice["text"] for choice in complete(server, prompt=prompt, max_tokens=2)["choices"]
    ] == texts


def test_choices_are_prompt_major_and_carry_their_own_figures(server: LiveServer) -> None:
    reply = complete(server, prompt=["a", "b", "c"], n=2, max_tokens=5, seed=5)
    assert [(choice["index"], choice["text"][0]) for choice in reply["choices"]] == [
        *enumerate("aabbcc")
    ]
    assert all(choice["metrics"]["speculative_decoding"] == FIGURES for choice in reply["choices"])
    assert "metrics" not in reply
    assert reply["usage"]["prompt_tokens"] == 3 and reply["usage"]["completion_tokens"] == 30
    assert [request.seed for request in server.engine.submitted[-6:]] == [5, 5 + 10**6] * 3


def test_max_tokens_defaults_to_16_for_completions_and_to_the_room_left_for_chat(
    server: LiveServer,
) -> None:
    assert complete(server, prompt="a")["usage"]["completion_tokens"] == 16
    chat(server, max_completion_tokens=3)
    assert server.engine.submitted[-1].sampling.max_tokens == 3
    chat(server)
    assert server.engine.submitted[-1].sampling.max_tokens == 512 - 5


def test_chat_goes_through_the_template_and_reports_ids(server: LiveServer) -> None:
    reply = chat(server, max_tokens=2, return_token_ids=True)
    assert reply["object"] == "chat.completion" and reply["prompt_token_ids"] == [
        257,
        *b"hi",
        256,
        258,
    ]
    [choice] = reply["choices"]
    assert choice["message"] == {"role": "assistant", "content": "h"} and choice["token_ids"] == [
        257,
        104,
    ]
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    chat(server, max_tokens=1, messages=[{"role": "user", "content": parts}])
    assert server.engine.submitted[-1].token_ids == [257, *b"h\ni", 256, 258]


def test_tools_and_template_arguments_reach_the_template(model: Path, tmp_path: Path) -> None:
    template = (
        "{% if enable_thinking %}T{% endif %}{{ tools | length }}"
        "{% for m in messages %}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.arguments.x }}{% endfor %}{% endfor %}"
        "{% if add_generation_prompt %}>{% endif %}"
    )
    for file in model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").write_text(template)
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 7}'}}
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "out", "tool_call_id": "1"},
    ]
    body = {
        "messages": messages,
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "chat_template_kwargs": {"enable_thinking": True, "messages": "mine", "unheard_of": 1},
    }
    with live_server(tmp_path) as server:
        assert bytes(done(server, "/tokenize", **body)["tokens"]) == b"T17out>"
        assert (
            bytes(done(server, "/tokenize", **body, add_generation_prompt=False)["tokens"])
            == b"T17out"
        )
        chat(server, **body, max_tokens=1)
        assert bytes(server.engine.submitted[-1].token_ids) == b"T17out>"


STREAMED = [
    {"max_tokens": 7},
    {"max_tokens": 20, "stop": ["wo", "zz"]},
    {"max_tokens": 9, "n": 3, "return_token_ids": True},
    {"max_tokens": 8, "logprobs": True, "return_weight_versions": True},
]


@pytest.mark.parametrize(
    "extra",
    [*STREAMED, {"max_tokens": 4, "echo": True, "logprobs": 2, "prompt_logprobs": 1}],
    ids=range(5),
)
def test_a_streamed_completion_adds_up_to_the_whole_one(
    server: LiveServer, extra: dict[str, Any]
) -> None:
    body = {"prompt": ["hello world", "\u00e9\u20ac\U0001f680 wow"], "seed": 1, **extra}
    whole = complete(server, **body)
    parts = chunks(server, "/v1/completions", stream_options={"include_usage": True}, **body)
    assert (
        parts[-1]["choices"] == []
        and parts[-1]["usage"] == whole["usage"]
        and all(part["usage"] is None for part in parts[:-1])
    )
    assert len({part["id"] for part in parts}) == 1
    for choice in whole["choices"]:
        own = [c for part in parts for c in part["choices"] if c["index"] == choice["index"]]
        assert len(own) > 1
        added = {**own[-1], "text": "".join(c["text"] for c in own)}
        for name in ("prompt_token_ids", "prompt_logprobs"):
            added |= {name: own[0][name]} if name in own[0] else {}
        if "token_ids" in own[0]:
            added["token_ids"] = [id for c in own for id in c["token_ids"]]
        found = [c["logprobs"] for c in own if c["logprobs"]]
        added["logprobs"] = (
            {name: [x for f in found for x in f[name]] for name in found[0]} if found else None
        )
        assert added == choice
        assert all(c["finish_reason"] is None for c in own[:-1])


@pytest.mark.parametrize("extra", STREAMED, ids=range(4))
def test_a_streamed_chat_adds_up_to_the_whole_one(
    server: LiveServer, extra: dict[str, Any]
) -> None:
    body = {"messages": [{"role": "user", "content": "hello world"}], "seed": 1, **extra}
    whole = chat(server, **body)
    parts = chunks(server, "/v1/chat/completions", **body)
    assert all(part["object"] == "chat.completion.chunk" and "usage" not in part for part in parts)
    assert parts[0].get("prompt_token_ids") == whole.get("prompt_token_ids")
    for choice in whole["choices"]:
        own = [c for part in parts for c in part["choices"] if c["index"] == choice["index"]]
        assert [c["delta"].get("role") for c in own] == ["assistant"] + [None] * (len(own) - 1)
        assert "".join(c["delta"]["content"] for c in own) == choice["message"]["content"]
        tokens = [token for c in own if c["logprobs"] for token in c["logprobs"]["content"]]
        assert tokens == (choice["logprobs"]["content"] if choice["logprobs"] else [])
        assert [id for c in own for id in c.get("token_ids", [])] == choice.get("token_ids", [])
        assert {
            name: own[-1][name] for name in own[-1].keys() - {"delta", "logprobs", "token_ids"}
        } == {name: choice[name] for name in choice.keys() - {"message", "logprobs", "token_ids"}}


def test_a_stop_string_is_cut_across_outputs_and_a_stop_token_is_named(server: LiveServer) -> None:
    [choice] = complete(server, prompt="hello world", max_tokens=50, stop=["wo"])["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (
        "hello ",
        "stop",
        "wo",
    )
    streamed = chunks(server, "/v1/completions", prompt="hello world", max_tokens=50, stop="wo")
    assert "".join(part["choices"][0]["text"] for part in streamed) == "hello "
    [by_eos, by_id] = complete(server, prompt=[[65, EOS], [65, 66]], stop_token_ids=[66])["choices"]
    assert (by_eos["finish_reason"], by_eos["stop_reason"], by_id["stop_reason"]) == (
        "stop",
        None,
        66,
    )


def test_completion_logprobs_count_characters_and_bytes_may_be_half_a_character(
    server: LiveServer,
) -> None:
    found = complete(server, prompt="a\u20acb", max_tokens=5, logprobs=0)["choices"][0]["logprobs"]
    assert found["tokens"] == ["a", "\ufffd", "\ufffd", "\ufffd", "b"]
    assert found["text_offset"] == [0, 1, 2, 2, 2] and found["token_logprobs"] == [-0.5] * 5
    named = complete(
        server, prompt="ab", max_tokens=2, logprobs=1, return_tokens_as_token_ids=True
    )["choices"][0]["logprobs"]
    assert named["tokens"] == ["token_id:97", "token_id:98"] and named["top_logprobs"] == [
        {"token_id:97": -0.5},
        {"token_id:98": -0.5},
    ]


@pytest.mark.parametrize(
    ("logprobs", "alternatives"), [(False, None), (None, None), (0, 0), (True, 1), (3, 3)]
)
def test_logprobs_may_be_a_bool_or_a_number(
    server: LiveServer, logprobs: Any, alternatives: int | None
) -> None:
    [choice] = complete(server, prompt="ab", max_tokens=2, logprobs=logprobs)["choices"]
    assert (choice["logprobs"] is None) == (alternatives is None)
    assert server.engine.submitted[-1].sampling.logprobs == (alternatives or 0)


def test_chat_logprobs_hold_tokens_bytes_and_alternatives(server: LiveServer) -> None:
    messages = [{"role": "user", "content": "\u20ac"}]
    content = chat(server, messages=messages, max_tokens=3, logprobs=True, top_logprobs=1)[
        "choices"
    ][0]["logprobs"]["content"]
    assert content[0]["token"] == "<|user|>" and content[1]["bytes"] == [0xE2]
    assert content[1]["top_logprobs"] == [{"token": "\ufffd", "logprob": -0.5, "bytes": [0xE2]}]
    named = chat(server, max_tokens=1, logprobs=True, return_tokens_as_token_ids=True)["choices"][
        0
    ]["logprobs"]["content"]
    assert named[0]["token"] == "token_id:257" and named[0]["top_logprobs"] == []
    assert chat(server, max_tokens=1)["choices"][0]["logprobs"] is None


def test_echo_puts_the_prompt_in_front_of_text_and_logprobs(server: LiveServer) -> None:
    [choice] = complete(server, prompt="ab", max_tokens=2, echo=True, logprobs=1)["choices"]
    assert choice["text"] == "abab" and "prompt_logprobs" not in choice
    assert choice["logprobs"]["tokens"] == ["a", "b", "a", "b"] and choice["logprobs"][
        "text_offset"
    ] == [0, 1, 2, 3]
    assert choice["logprobs"]["token_logprobs"] == [None, -2.0, -0.5, -0.5]
    assert choice["logprobs"]["top_logprobs"][:2] == [None, {"A": -0.1, "b": -2.0}]
    assert complete(server, prompt=[97, 98], max_tokens=1, echo=True)["choices"][0]["text"] == "aba"


def test_prompt_logprobs_are_by_token_id_with_rank(server: LiveServer) -> None:
    own, best = (
        {"logprob": -2.0, "rank": None, "decoded_token": "b"},
        {"logprob": -0.1, "rank": 1, "decoded_token": "A"},
    )
    expected = [None, {"98": own, "65": best}]
    assert (
        complete(server, prompt="ab", max_tokens=1, prompt_logprobs=1)["choices"][0][
            "prompt_logprobs"
        ]
        == expected
    )
    assert len(chat(server, max_tokens=1, prompt_logprobs=0)["prompt_logprobs"]) == 5


@pytest.mark.parametrize("stream", [False, True])
def test_with_max_tokens_0_the_prompt_is_scored_and_nothing_follows(
    server: LiveServer, stream: bool
) -> None:
    body = {
        "prompt": ["ab", "abc"],
        "max_tokens": 0,
        "echo": True,
        "logprobs": 1,
        "prompt_logprobs": 0,
    }
    replies = chunks(server, COMPLETIONS, **body) if stream else [complete(server, **body)]
    choices = [choice for reply in replies for choice in reply["choices"]]
    assert [(c["text"], c["finish_reason"]) for c in choices] == [
        ("ab", "length"),
        ("abc", "length"),
    ]
    assert choices[0]["logprobs"] == {
        "tokens": ["a", "b"],
        "token_logprobs": [None, -2.0],
        "text_offset": [0, 1],
        "top_logprobs": [None, {"A": -0.1, "b": -2.0}],
    }
    assert choices[0]["prompt_logprobs"] == [
        None,
        {"98": {"logprob": -2.0, "rank": None, "decoded_token": "b"}},
    ]
    for field in ("max_tokens", "max_completion_tokens"):
        answer = chat(server, prompt_logprobs=0, **{field: 0})
        assert (
            answer["choices"][0]["message"]["content"] == "" and len(answer["prompt_logprobs"]) == 5
        )
        assert answer["usage"]["completion_tokens"] == 0


def test_prompt_logprobs_minus_1_is_the_whole_vocabulary_where_max_logprobs_holds_it(
    model: Path,
) -> None:
    with live_server(model, max_logprobs=300) as server:
        complete(server, prompt="ab", max_tokens=0, prompt_logprobs=-1)
        assert server.engine.submitted[-1].sampling.prompt_logprobs == 300
        complete(server, prompt="ab", max_tokens=0, prompt_logprobs=-1, echo=True, logprobs=2)
        assert server.engine.submitted[-1].sampling.prompt_logprobs == 300


def test_sampling_fields_reach_the_engine_as_the_native_ones_do(server: LiveServer) -> None:
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "logit_bias": {"5": 1.5},
        "stop": ["q"],
        "stop_token_ids": [9],
        "ignore_eos": True,
        "min_tokens": 2,
        "max_tokens": 4,
    }
    complete(server, prompt="abc", seed=11, cache_salt="v7", priority=3, user="me", **fields)
    ours = server.engine.submitted[-1]
    with Client(server.url) as client:
        client.generate([{"prompt": "abc", "seed": 11, "salt": "v7"}], sampling=fields)
    native = server.engine.submitted[-1]
    assert (ours.sampling, ours.seed, ours.salt, ours.token_ids) == (
        native.sampling,
        native.seed,
        native.salt,
        native.token_ids,
    )


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"model": "tiny"},
        {"model": ""},
        {"top_k": 0},
        {"top_k": -1},
        {"top_k": 100_000_000},
        {"best_of": 1, "suffix": None, "guided": {}},
        dict.fromkeys(
            [
                "temperature",
                "top_p",
                "n",
                "stop",
                "seed",
                "logit_bias",
                "stream",
                "stream_options",
                "max_tokens",
                "user",
            ]
        ),
        {"logit_bias": {}},
        {"stop": []},
        {"temperature": 0},
        {"stream_options": {"include_usage": True, "other": 1}},
    ],
)
def test_extra_fields_of_clients_are_tolerated(server: LiveServer, extra: dict[str, Any]) -> None:
    assert complete(server, prompt="a", **extra)["choices"][0]["text"]
    assert chat(server, **{"max_tokens": 4, **extra})["choices"][0]["message"]
    assert server.engine.submitted[-1].sampling.top_k in (0, 100_000_000)


def test_tokenize_and_detokenize_are_inverse_with_special_tokens(server: LiveServer) -> None:
    assert done(server, "/tokenize", prompt="hi") == {
        "tokens": [*b"hi"],
        "count": 2,
        "max_model_len": 512,
    }
    tokens = done(server, "/tokenize", messages=USER)["tokens"]
    assert tokens == [257, *b"hi", 256, 258]
    assert done(server, "/detokenize", tokens=tokens) == {
        "prompt": "<|user|>hi<|end|><|assistant|>"
    }


def test_arguments_of_tool_calls_that_are_not_json_stay_text(server: LiveServer) -> None:
    for arguments in ("{", '"\\ud800"', "NaN", "[" * 3000):
        call = {"function": {"name": "f", "arguments": arguments}}
        assert chat(server, messages=[{"role": "assistant", "tool_calls": [call]}], max_tokens=1)[
            "choices"
        ]


def test_without_a_tokenizer_token_ids_go_in_and_out(model: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((model / "config.json").read_bytes())
    with live_server(tmp_path) as server:
        [choice] = complete(
            server, prompt=[65, 66], max_tokens=2, logprobs=1, return_token_ids=True, echo=True
        )["choices"]
        assert choice["token_ids"] == [65, 66] and choice["text"] == ""
        assert choice["logprobs"]["tokens"] == ["token_id:65", "token_id:66"] * 2
        for path, body in (
            ("/detokenize", {"tokens": [65]}),
            ("/tokenize", {"prompt": "a"}),
            (COMPLETIONS, {"prompt": "a"}),
        ):
            assert "no tokenizer.json" in post(server, path, **body).json()["error"]["message"]


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
    (COMPLETIONS, {"prompt": "a", "max_tokens": 512}, 400, "max_tokens", "the limit here is 511"),
    (COMPLETIONS, {"prompt": "a", "temperature": 200}, 400, "temperature", "temperature is 200"),
    (COMPLETIONS, {"prompt": "a", "temperature": "1"}, 400, "temperature", "temperature is '1'"),
    (COMPLETIONS, {"prompt": "a", "top_k": -2}, 400, "top_k", "top_k is -2"),
    (COMPLETIONS, {"prompt": "a", "top_p": 0}, 400, "top_p", "top_p is 0"),
    (COMPLETIONS, {"prompt": "a", "logprobs": 6}, 400, "logprobs", "the limit is 5 (max_logprobs)"),
    (COMPLETIONS, {"prompt": "a", "logprobs": -1}, 400, "logprobs", "logprobs is -1"),
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
    (COMPLETIONS, {"prompt": "a", "seed": -1}, 400, "seed", "seed is -1"),
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
    assert (error["type"], error["code"]) == kinds[status]
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
        *CompletionRequest.model_fields,
        *ChatRequest.model_fields,
        *TokenizeRequest.model_fields,
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
