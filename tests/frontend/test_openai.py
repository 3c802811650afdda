"""The OpenAI dialect against the fake engine: shapes, order, streams that add up to whole replies,
tolerance, typed refusals.
"""

import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.frontend.fake_engine import EOS
from tests.frontend.live_server import LiveServer, live_server
from tests.frontend.openai_calls import (
    COMPLETIONS,
    USER,
    chat,
    chunks,
    complete,
    done,
    post,
    server,
)
from tlt_client import Client

__all__ = ["server"]  # fixtures
FIGURES = {
    "mean_acceptance_length": 2.5,
    "draft_acceptance_rate": 3 / 6,
    "acceptance_histogram": [0, 1, 1],
    "num_spec_steps": 2,
    "num_accepted_draft_tokens": 3,
    "num_draft_tokens": 6,
    "num_spec_tokens": 2,
}


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
    assert (reply["object"], reply["model"]) == ("text_completion", "tiny")
    assert reply["id"].startswith("cmpl-")
    [choice] = reply["choices"]
    assert (choice["index"], choice["text"], choice["finish_reason"]) == (0, "xyzxy", "length")
    assert choice["stop_reason"] is None
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
def test_prompt_may_have_any_of_four_forms(
    server: LiveServer, prompt: Any, texts: list[str]
) -> None:
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


def test_completions_and_chat_have_their_own_default_max_tokens(server: LiveServer) -> None:
    assert complete(server, prompt="a")["usage"]["completion_tokens"] == 16
    chat(server, max_completion_tokens=3)
    assert server.engine.submitted[-1].sampling.max_tokens == 3
    chat(server)
    assert server.engine.submitted[-1].sampling.max_tokens == 512 - 5


def test_chat_goes_through_the_template_and_reports_ids(server: LiveServer) -> None:
    reply = chat(server, max_tokens=2, return_token_ids=True)
    assert reply["object"] == "chat.completion"
    assert reply["prompt_token_ids"] == [257, *b"hi", 256, 258]
    [choice] = reply["choices"]
    assert choice["message"] == {"role": "assistant", "content": "h"}
    assert choice["token_ids"] == [257, 104]
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
    assert parts[-1]["choices"] == [] and parts[-1]["usage"] == whole["usage"]
    assert all(part["usage"] is None for part in parts[:-1])
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


def test_stop_strings_are_cut_and_stop_tokens_named(server: LiveServer) -> None:
    [choice] = complete(server, prompt="hello world", max_tokens=50, stop=["wo"])["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("hello ", "stop")
    assert choice["stop_reason"] == "wo"
    streamed = chunks(server, "/v1/completions", prompt="hello world", max_tokens=50, stop="wo")
    assert "".join(part["choices"][0]["text"] for part in streamed) == "hello "
    [by_eos, by_id] = complete(server, prompt=[[65, EOS], [65, 66]], stop_token_ids=[66])["choices"]
    assert (by_eos["finish_reason"], by_eos["stop_reason"]) == ("stop", None)
    assert by_id["stop_reason"] == 66


def test_sampling_fields_reach_the_engine_like_native_fields(server: LiveServer) -> None:
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
    assert (ours.sampling, ours.seed, ours.salt) == (native.sampling, native.seed, native.salt)
    assert ours.token_ids == native.token_ids


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
                *("temperature", "top_p", "n", "stop", "seed", "logit_bias", "stream"),
                *("stream_options", "max_tokens", "user"),
            ]
        ),
        {"logit_bias": {}},
        {"stop": []},
        {"temperature": 0},
        {"stream_options": {"include_usage": True, "other": 1}},
    ],
)
def test_known_extra_fields_of_clients_are_tolerated(
    server: LiveServer, extra: dict[str, Any]
) -> None:
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


def test_non_json_arguments_of_tool_calls_stay_text(server: LiveServer) -> None:
    for arguments in ("{", '"\\ud800"', "NaN", "[" * 3000):
        call = {"function": {"name": "f", "arguments": arguments}}
        assert chat(server, messages=[{"role": "assistant", "tool_calls": [call]}], max_tokens=1)[
            "choices"
        ]


def test_model_without_a_tokenizer_takes_and_returns_token_ids(model: Path, tmp_path: Path) -> None:
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


def test_models_route_reports_when_the_server_started(server: LiveServer) -> None:
    models = httpx.get(f"{server.url}/v1/models", timeout=10).json()["data"]
    assert all(time.time() - 3600 < model["created"] <= time.time() for model in models)


@pytest.mark.parametrize(
    "path", ["/v1/models", "/v1/models/tiny", "/health", "/version", "/openapi.json"]
)
def test_a_path_may_end_with_a_slash(server: LiveServer, path: str) -> None:
    plain, slashed = (httpx.get(server.url + path + end, timeout=10) for end in ("", "/"))
    assert (slashed.status_code, slashed.content) == (plain.status_code, plain.content)
    assert plain.status_code == 200
    assert httpx.get(f"{server.url}{path}//", timeout=10).status_code == 404
    assert httpx.post(f"{server.url}/v1/completions/", json={}, timeout=10).status_code == 400
