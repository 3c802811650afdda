"""The OpenAI dialect: log-probs of outputs in both shapes, and of prompts."""

from pathlib import Path
from typing import Any

import pytest

from tests.frontend.live_server import LiveServer, live_server
from tests.frontend.openai_calls import COMPLETIONS, chat, chunks, complete, server

__all__ = ["server"]  # a fixture


def test_completion_logprobs_offsets_count_characters(server: LiveServer) -> None:
    found = complete(server, prompt="a\u20acb", max_tokens=5, logprobs=0)["choices"][0]["logprobs"]
    assert found["tokens"] == ["a", "\ufffd", "\ufffd", "\ufffd", "b"]
    assert found["text_offset"] == [0, 1, 2, 2, 2] and found["token_logprobs"] == [-0.5] * 5
    named = complete(
        server, prompt="ab", max_tokens=2, logprobs=1, return_tokens_as_token_ids=True
    )["choices"][0]["logprobs"]
    assert named["tokens"] == ["token_id:97", "token_id:98"]
    assert named["top_logprobs"] == [{"token_id:97": -0.5}, {"token_id:98": -0.5}]


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
    assert choice["logprobs"]["tokens"] == ["a", "b", "a", "b"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3]
    assert choice["logprobs"]["token_logprobs"] == [None, -2.0, -0.5, -0.5]
    assert choice["logprobs"]["top_logprobs"][:2] == [None, {"A": -0.1, "b": -2.0}]
    assert complete(server, prompt=[97, 98], max_tokens=1, echo=True)["choices"][0]["text"] == "aba"


def test_prompt_logprobs_are_keyed_by_token_id_and_give_ranks(server: LiveServer) -> None:
    own = {"logprob": -2.0, "rank": None, "decoded_token": "b"}
    best = {"logprob": -0.1, "rank": 1, "decoded_token": "A"}
    expected = [None, {"98": own, "65": best}]
    assert (
        complete(server, prompt="ab", max_tokens=1, prompt_logprobs=1)["choices"][0][
            "prompt_logprobs"
        ]
        == expected
    )
    assert len(chat(server, max_tokens=1, prompt_logprobs=0)["prompt_logprobs"]) == 5


@pytest.mark.parametrize("stream", [False, True])
def test_max_tokens_0_only_scores_the_prompt(server: LiveServer, stream: bool) -> None:
    body = {
        "prompt": ["ab", "abc"],
        "max_tokens": 0,
        "echo": True,
        "logprobs": 1,
        "prompt_logprobs": 0,
    }
    replies = chunks(server, COMPLETIONS, **body) if stream else [complete(server, **body)]
    choices = [choice for reply in replies for choice in reply["choices"]]
    choices.sort(key=lambda choice: choice["index"])  # a stream gives them as they come
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
        assert answer["choices"][0]["message"]["content"] == ""
        assert len(answer["prompt_logprobs"]) == 5
        assert answer["usage"]["completion_tokens"] == 0


def test_prompt_logprobs_minus_1_returns_the_whole_vocabulary(model: Path) -> None:
    with live_server(model, max_logprobs=300) as server:
        complete(server, prompt="ab", max_tokens=0, prompt_logprobs=-1)
        assert server.engine.submitted[-1].sampling.prompt_logprobs == 300
        complete(server, prompt="ab", max_tokens=0, prompt_logprobs=-1, echo=True, logprobs=2)
        assert server.engine.submitted[-1].sampling.prompt_logprobs == 300
