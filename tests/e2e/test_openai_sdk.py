"""The OpenAI SDK against a real server with the shipped pair: its own parsing is the check, and
`/generate` is the reference.
"""

from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tlt_client import Client
from tlt_server.demo.server import ServerProcess

MODEL = "target"
QUESTION: Any = [{"role": "user", "content": "Compute 3*4+5."}]
PROMPTS = ["2+2=", "3*4+5="]
LENGTH = 48


class Sum(BaseModel):
    sign: Literal["+", "-"]
    small: bool


@pytest.fixture
def sdk(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", timeout=60, max_retries=0
    ) as sdk:
        yield sdk


def extra(model: Any) -> dict[str, Any]:
    return model.model_extra or {}


def test_completions_match_native_tokens_for_the_same_seed(
    sdk: openai.OpenAI, client: Client
) -> None:
    reply = sdk.completions.create(
        model=MODEL,
        prompt=PROMPTS,
        n=2,
        max_tokens=LENGTH,
        seed=7,
        temperature=0.9,
        logprobs=2,
        extra_body={"return_token_ids": True, "top_k": 50, "return_weight_versions": True},
    )
    native = client.generate(
        [{"prompt": prompt, "n": 2, "seed": 7} for prompt in PROMPTS],
        sampling={"max_tokens": LENGTH, "temperature": 0.9, "top_k": 50},
    )
    expected = [choice for result in native.results for choice in result.choices]
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    for ours, choice in zip(reply.choices, expected, strict=True):
        assert (extra(ours)["token_ids"], ours.text) == (choice.token_ids, choice.text)
        assert ours.finish_reason == choice.finish_reason
        assert ours.logprobs is not None and ours.logprobs.token_logprobs == choice.logprobs
        assert extra(ours)["weight_versions"][-1]["end"] == len(choice.token_ids)
        figures = extra(ours)["metrics"]["speculative_decoding"]
        assert figures is None or sum(figures["acceptance_histogram"]) == figures["num_spec_steps"]
    assert reply.usage is not None
    assert reply.usage.completion_tokens == sum(len(choice.token_ids) for choice in expected)


def test_chat_has_the_native_tokens_and_is_reproducible(sdk: openai.OpenAI, client: Client) -> None:
    def ask(seed: int) -> Any:
        return sdk.chat.completions.create(
            model=MODEL,
            messages=QUESTION,
            n=3,
            seed=seed,
            max_completion_tokens=LENGTH,
            logprobs=True,
            top_logprobs=2,
            extra_body={"return_token_ids": True},
        )

    first, again, other = ask(3), ask(3), ask(4)
    native = client.generate(
        [{"messages": QUESTION, "n": 3, "seed": 3}], sampling={"max_tokens": LENGTH}
    ).results[0]
    for a, b, choice in zip(first.choices, again.choices, native.choices, strict=True):
        assert a.message.content == b.message.content == choice.text and a.logprobs == b.logprobs
        assert extra(a)["token_ids"] == choice.token_ids
        assert [token.logprob for token in a.logprobs.content] == choice.logprobs
        assert b"".join(bytes(token.bytes) for token in a.logprobs.content).startswith(
            (choice.text or "").encode()
        )
    assert [extra(c)["token_ids"] for c in other.choices] != [
        extra(c)["token_ids"] for c in first.choices
    ]


def test_max_tokens_0_scores_the_prompt_bit_for_bit(sdk: openai.OpenAI, client: Client) -> None:
    reply = sdk.completions.create(
        model=MODEL,
        prompt=PROMPTS,
        max_tokens=0,
        echo=True,
        logprobs=3,
        extra_body={"return_token_ids": True},
    )
    native = client.generate(
        [{"prompt": prompt} for prompt in PROMPTS], sampling={"max_tokens": 4, "prompt_logprobs": 3}
    )
    for ours, result, prompt in zip(reply.choices, native.results, PROMPTS, strict=True):
        [choice] = result.choices
        assert (ours.text, ours.finish_reason, extra(ours)["token_ids"]) == (prompt, "length", [])
        assert choice.prompt_logprobs is not None and ours.logprobs is not None
        assert ours.logprobs.token_logprobs == [
            None,
            *(each[1][0] for each in choice.prompt_logprobs if each),
        ]
    assert reply.usage is not None and reply.usage.completion_tokens == 0
    chat = sdk.chat.completions.create(
        model=MODEL, messages=QUESTION, max_completion_tokens=0, extra_body={"prompt_logprobs": 0}
    )
    assert (
        chat.choices[0].message.content == ""
        and len(extra(chat)["prompt_logprobs"]) == chat.usage.prompt_tokens
    )  # type: ignore[union-attr]


def test_choice_reports_its_end_before_its_siblings_end(sdk: openai.OpenAI) -> None:
    question: Any = [{"role": "user", "content": "Use 3,7,11 to make 300."}]
    asked: dict[str, Any] = {"model": MODEL, "n": 4, "seed": 7, "max_tokens": 300, "stream": True}
    for stream in (
        sdk.completions.create(prompt=PROMPTS[1], **asked),
        sdk.chat.completions.create(messages=question, **asked),
    ):
        ends, late = set(), 0  # late: chunks of other choices after the first end
        for part in stream:
            for choice in part.choices:
                assert choice.index not in ends, "a choice has ended and goes on"
                late += bool(ends) and choice.finish_reason is None
                if choice.finish_reason is not None:
                    ends.add(choice.index)
        assert len(ends) == 4 and late, (
            "these choices have different lengths, and one must end while another goes on"
        )


def test_refusals_raise_the_sdks_own_error_classes(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="max_tokens is -1") as caught:
        sdk.completions.create(model=MODEL, prompt="a", max_tokens=-1)
    assert (caught.value.param, caught.value.code) == ("max_tokens", "invalid_request")
    assert caught.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError, match="this server serves 'target'"):
        sdk.chat.completions.create(model="other", messages=QUESTION)


def test_a_model_without_tool_training_makes_required_calls(sdk: openai.OpenAI) -> None:
    """The calls are the same with speculation and without, and their arguments fit the schema."""
    tools: Any = [openai.pydantic_function_tool(Sum, name=name) for name in ("add", "take")]
    found = []
    for sd in ("goodput", "off"):
        sdk.put("/../strategy", body={"policy": sd}, cast_to=object)
        for choice in ("required", {"type": "function", "function": {"name": "take"}}):
            answer = sdk.chat.completions.parse(
                model=MODEL,
                messages=QUESTION,
                tools=tools,
                tool_choice=choice,
                parallel_tool_calls=False,
                seed=7,
                n=2,
            )
            for each in answer.choices:
                assert each.finish_reason == "tool_calls" and not each.message.content
                for call in each.message.tool_calls or []:
                    assert isinstance(call.function.parsed_arguments, Sum)
                    assert choice == "required" or call.function.name == "take"
                    found.append((sd, call.function.name, call.function.arguments))
    half = len(found) // 2
    assert half and [each[1:] for each in found[:half]] == [each[1:] for each in found[half:]]
    typed = sdk.responses.parse(model=MODEL, input="2+2=", text_format=Sum)
    assert isinstance(typed.output_parsed, Sum)
