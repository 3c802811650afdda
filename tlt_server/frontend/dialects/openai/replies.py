"""Replies of the OpenAI dialect: their shapes, which the OpenAPI document shows, and the errors and
figures in them.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Struct, UnsetType

from tlt_client.wire import FinishReason, SdReport, VersionSpan
from tlt_server.frontend.dialects.openai.requests import ChatRequest, CompletionRequest
from tlt_server.frontend.dialects.replies.errors import failure_naming
from tlt_server.frontend.dialects.replies.logprobs import (
    ChatLogprobs,
    Logprobs,
    MetaInfo,
    PromptLogprobs,
)
from tlt_server.frontend.dialects.replies.whole import OpenAIUsage

# Fields of choices and replies of both kinds
StopReason = Annotated[
    int | str | None, "the stop token's id or the stop string; null for another end"
]
SpansOfVersions = Annotated[
    list[VersionSpan] | UnsetType,
    "which weights computed which tokens; with `return_weight_versions`",
]
PromptScores = Annotated[
    PromptLogprobs | UnsetType, "per prompt token, null for the first; where asked for"
]
UsageOfAll = Annotated[
    OpenAIUsage | None | UnsetType,
    "tokens of the whole request; in chunks null except in the last one, with `include_usage`",
]


class Speculation(Struct, frozen=True):
    """The figures of speculation on one choice."""

    mean_acceptance_length: Annotated[
        float, "tokens per step that had a draft, the bonus token included"
    ]
    draft_acceptance_rate: Annotated[float, "the fraction of verified drafts that was accepted"]
    acceptance_histogram: Annotated[list[int], "entry k: steps that accepted k drafts"]
    num_spec_steps: Annotated[int, "steps that had a draft"]
    num_accepted_draft_tokens: Annotated[int, "drafts accepted"]
    num_draft_tokens: Annotated[int, "drafts verified"]
    num_spec_tokens: Annotated[int, "the largest number that one step accepted"]


class RequestMetrics(Struct, frozen=True):
    """Additional figures of a reply."""

    speculative_decoding: Annotated[Speculation | None, "null for a choice that never had a draft"]


class CompletionChoice(Struct, kw_only=True):
    index: Annotated[int, "p * n + i for choice i of prompt p"]
    text: Annotated[str, "the output, or in a chunk what was added; with `echo` after the prompt"]
    logprobs: Annotated[Logprobs | None, "log-probs of the tokens, if asked for"] = None
    finish_reason: Annotated[
        FinishReason | None, "what ended it; null in a chunk that does not"
    ] = None
    stop_reason: StopReason = None
    token_ids: Annotated[list[int] | UnsetType, "the tokens; with `return_token_ids`"] = UNSET
    prompt_token_ids: Annotated[
        list[int] | UnsetType, "the prompt's tokens; with `return_token_ids`"
    ] = UNSET
    prompt_logprobs: PromptScores = UNSET
    weight_versions: SpansOfVersions = UNSET
    metrics: Annotated[RequestMetrics | UnsetType, "figures of its speculation"] = UNSET


class CalledFunction(Struct):
    name: Annotated[str, "the function"]
    arguments: Annotated[str, "valid JSON, as the model wrote it"]


class ToolCall(Struct):
    function: Annotated[CalledFunction, "what is called"]
    id: Annotated[str, "for `tool_call_id` of the function's output"]
    type: Annotated[Literal["function"], "the kind of call"] = "function"
    index: Annotated[int | UnsetType, "which of the calls; in a chunk"] = UNSET


class Speech(Struct):
    role: Annotated[Literal["assistant"] | UnsetType, "who speaks"] = UNSET
    content: Annotated[
        str | None | UnsetType,
        "the text, or in a chunk what was added; null next to calls alone, or with "
        "return_meta_info empty",
    ] = UNSET
    tool_calls: Annotated[list[ToolCall] | UnsetType, "calls that the model made"] = UNSET
    reasoning_content: Annotated[
        str | UnsetType, "what it thought before; with a reasoning_parser"
    ] = UNSET
    reasoning: Annotated[str | UnsetType, "the same by its other name"] = UNSET


class ChatChoice(Struct, kw_only=True):
    """A choice, with `message` in a whole reply and `delta` in a chunk of a stream."""

    index: Annotated[int, "which of the n choices, from 0"]
    message: Annotated[Speech | UnsetType, "the answer; in a whole reply"] = UNSET
    delta: Annotated[Speech | UnsetType, "what was added to the answer; in a chunk"] = UNSET
    logprobs: Annotated[ChatLogprobs | None, "log-probs of the tokens, if asked for"] = None
    finish_reason: Annotated[
        FinishReason | Literal["tool_calls"] | None,
        "what ended it, tool_calls: it stopped after calls; null in a chunk that does not end it",
    ] = None
    stop_reason: StopReason = None
    token_ids: Annotated[list[int] | UnsetType, "the tokens; with `return_token_ids`"] = UNSET
    prompt_token_ids: Annotated[
        list[int] | UnsetType, "the conversation's tokens; with `return_prompt_token_ids`"
    ] = UNSET
    weight_versions: SpansOfVersions = UNSET
    metrics: Annotated[RequestMetrics | UnsetType, "figures of its speculation"] = UNSET
    meta_info: Annotated[
        MetaInfo | UnsetType, "figures in SGLang's form, at the end; with `return_meta_info`"
    ] = UNSET


class Completion(Struct, kw_only=True):
    id: Annotated[str, "id of the reply, the same in all its chunks"]
    object: Annotated[Literal["text_completion"], "the kind of reply"] = "text_completion"
    created: Annotated[int, "Unix seconds"]
    model: Annotated[str, "the name of the served model"]
    choices: Annotated[
        list[CompletionChoice],
        "choices of all prompts; in a chunk those that gained something, and none in the last one "
        "with `usage`",
    ]
    usage: UsageOfAll = UNSET
    metrics: Annotated[RequestMetrics | UnsetType, "figures of a reply's only choice"] = UNSET


class ChatCompletion(Struct, kw_only=True):
    id: Annotated[str, "id of the reply, the same in all its chunks"]
    object: Annotated[Literal["chat.completion", "chat.completion.chunk"], "the kind of reply"] = (
        "chat.completion"
    )
    created: Annotated[int, "Unix seconds"]
    model: Annotated[str, "the name of the served model"]
    choices: Annotated[
        list[ChatChoice],
        "choices of the conversation; in a chunk those that gained something, and none in the last "
        "one with `usage`",
    ]
    usage: UsageOfAll = UNSET
    prompt_token_ids: Annotated[
        list[int] | UnsetType, "the conversation's tokens; with `return_token_ids`"
    ] = UNSET
    prompt_logprobs: PromptScores = UNSET
    metrics: Annotated[RequestMetrics | UnsetType, "figures of a reply's only choice"] = UNSET


class Model(Struct, frozen=True):
    id: Annotated[str, "the name to send as `model`"]
    created: Annotated[int, "when the server started, in Unix seconds"]
    max_model_len: Annotated[int, "the longest prompt plus output, in tokens"]
    root: Annotated[
        str,
        "the directory of the model, or its name for a key that may neither push nor operate; of a "
        "LoRA adapter its version",
    ]
    parent: Annotated[str | None, "of a LoRA adapter the model's name; else null"] = None
    object: Annotated[Literal["model"], "the kind of entry"] = "model"
    owned_by: Annotated[Literal["tlt"], "always the same"] = "tlt"


class Models(Struct, frozen=True):
    data: Annotated[
        list[Model], "the names of the one model that is served, then its LoRA adapters"
    ]
    object: Annotated[Literal["list"], "the kind of reply"] = "list"


class Tokens(Struct, frozen=True):
    tokens: Annotated[list[int], "token ids"]
    count: Annotated[int, "number of token ids"]
    max_model_len: Annotated[int, "the longest prompt plus output, in tokens"]


class Rendered(Struct, frozen=True):
    model: Annotated[str, "the name of the served model"]
    prompt: Annotated[str, "the conversation in the chat template"]
    token_ids: Annotated[list[int], "its tokens"]
    count: Annotated[int, "number of token ids"]
    max_model_len: Annotated[int, "the longest prompt plus output, in tokens"]


class TokenizerInfo(Struct, frozen=True, kw_only=True):
    tokenizer_class: Annotated[str, "always the same"] = "PreTrainedTokenizerFast"
    chat_template: Annotated[str | None, "null: messages are not read"]
    bos_token: Annotated[str | None, "null: there is none"]
    eos_token: Annotated[str | None, "null: there is none"]
    pad_token: Annotated[str | None, "null: there is none"]
    unk_token: Annotated[str | None, "null: there is none"]


class Detokenized(Struct, frozen=True):
    prompt: Annotated[str, "the text of the tokens"]


failure = failure_naming(
    {
        *CompletionRequest.__struct_fields__,
        *CompletionRequest.refused,
        *ChatRequest.__struct_fields__,
        *ChatRequest.refused,
        "tokens",
        "add_special_tokens",
    }
)


def figures(sd: SdReport) -> RequestMetrics:
    """Return the figures of a choice from its report of speculation."""
    if not sd.draft_steps:
        return RequestMetrics(None)
    return RequestMetrics(
        Speculation(
            mean_acceptance_length=1 + sd.accepted / sd.draft_steps,
            draft_acceptance_rate=sd.accepted / sd.drafted if sd.drafted else 0.0,
            acceptance_histogram=sd.histogram,
            num_spec_steps=sd.draft_steps,
            num_accepted_draft_tokens=sd.accepted,
            num_draft_tokens=sd.drafted,
            num_spec_tokens=max(0, len(sd.histogram) - 1),
        )
    )
