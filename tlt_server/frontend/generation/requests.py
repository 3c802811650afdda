"""Requests in the native form, as pydantic models of what is right on every server.

`http.bodies.read_object` and `http.fields.checked` are the only way in; `validation.Validator` then
applies the model's and the server's limits. A borrowed dialect declares models of its own and
translates them to `NativeRequest`.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from pydantic import ConfigDict, Field, ValidatorFunctionWrapHandler, WrapValidator

from tlt_server.frontend.http.fields import Strict, one_of
from tlt_server.records import MAX_SEED

MAX_INT32 = 2**31 - 1  # what the engine's packed parameters hold
_IDS = list[Annotated[int, msgspec.Meta(ge=0, le=MAX_INT32)]]


def _ids(value: Any, otherwise: ValidatorFunctionWrapHandler) -> Any:
    """Accept a list of ids in a quarter of the time of pydantic's own check, which runs only to
    explain a list that is wrong.
    """
    try:
        return msgspec.convert(value, _IDS)
    except msgspec.ValidationError:
        return otherwise(value)


TokenIds = Annotated[
    list[Annotated[int, Field(ge=0, le=MAX_INT32)]], Field(fail_fast=True), WrapValidator(_ids)
]
MAX_NAME = 256
ShortName = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
Salt = Annotated[str, Field(max_length=256)]
Count = Annotated[int, Field(ge=1, le=MAX_INT32)]
Length = Annotated[int, Field(ge=0, le=MAX_INT32)]
Seed = Annotated[int, Field(ge=0, le=MAX_SEED)]
Priority = Annotated[
    int,
    Field(
        ge=-MAX_INT32,
        le=MAX_INT32,
        description="sequences of lower values start first; below 0 needs the scope operate",
    ),
]


class SharedSampling(Strict):
    """Fields with the same name and meaning in all dialects."""

    temperature: float = Field(1.0, ge=0, le=100, description="0: the most likely token always")
    top_p: float = Field(
        1.0, gt=0, le=1, description="keep the most likely tokens up to this probability in all"
    )
    min_p: float = Field(
        0.0,
        ge=0,
        le=1,
        description="drop tokens below this fraction of the most likely one's probability",
    )
    min_tokens: int = Field(
        0,
        ge=0,
        le=MAX_INT32,
        description="no stop token, and no end at a stop string, before this many output tokens",
    )
    stop: str | list[str] = Field(default_factory=list, description="end before one of these texts")
    stop_token_ids: TokenIds = Field(
        default_factory=list, description="end with one of these tokens"
    )
    ignore_eos: bool = Field(False, description="the model's own end tokens do not end the output")
    repetition_penalty: float = Field(
        1.0, ge=0.01, le=100, description="on tokens of the prompt and the output; 1: none"
    )
    presence_penalty: float = Field(
        0.0, ge=-2, le=2, description="taken off the logits of tokens that the output has"
    )
    frequency_penalty: float = Field(
        0.0, ge=-2, le=2, description="taken off for each time that the output has the token"
    )
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] = Field(
        default_factory=dict, description="token id -> what is added to its logit"
    )


class SamplingFields(SharedSampling):
    """Sampling fields, all optional: an item's win over the batch's, those over the defaults."""

    top_k: int = Field(
        0, ge=0, le=MAX_INT32, description="keep this many most likely tokens; 0: all"
    )
    max_tokens: Length | None = Field(
        256,
        description="null: what the prompt leaves of the model's length; 0: only read the prompt",
    )
    logprobs: int = Field(
        0,
        ge=0,
        le=MAX_INT32,
        description="alternatives reported per token; the token's own log-prob always is",
    )
    raw_logprobs: bool = Field(
        False, description="report log-probs under the unprocessed distribution too"
    )
    prompt_logprobs: int | None = Field(
        None,
        ge=-1,
        le=MAX_INT32,
        description="alternatives per prompt token; null: not reported, -1: the whole vocabulary",
    )


class Message(Strict):
    role: ShortName = Field(description="whose turn it is, as the chat template knows it")
    content: str = Field(description="what was said")
    name: str | None = Field(None, description="who said it, for templates that ask")


PROMPTS = ("prompt", "token_ids", "messages")


class ItemFields(Strict):
    """One prompt, in one of three forms, and how many choices to make of it."""

    model_config = ConfigDict(json_schema_extra=one_of(PROMPTS))

    id: ShortName | None = Field(
        None, description="comes back with the results; ids of one batch differ"
    )
    prompt: str | None = Field(None, description="a text")
    token_ids: TokenIds | None = Field(None, description="a text as the model's tokens")
    messages: Annotated[list[Message], Field(min_length=1)] | None = Field(
        None, description="a conversation, for the chat template"
    )
    group_id: ShortName | None = Field(
        None, description="siblings draft from each other's text; absent: the choices of this item"
    )
    salt: Salt = Field(
        "", description="requests share cached prefixes only with those of the same salt"
    )
    n: Count = Field(1, description="choices")
    seed: Seed | None = Field(
        None,
        description=(
            "keys the choices' noise: the same seed gives the same tokens; absent: the server's own"
        ),
    )
    sd: bool = Field(
        True, description="false: never speculate on this item; its tokens are the same"
    )
    sampling: SamplingFields | None = Field(None, description="fields that differ from the batch's")


class NativeRequest(Strict):
    requests: list[ItemFields] = Field(
        min_length=1, description="the batch; all of it is admitted or nothing"
    )
    sampling: SamplingFields = Field(
        default_factory=SamplingFields, description="for items that say nothing else"
    )
    stream: bool = Field(
        False, description="server-sent events as tokens come, instead of one reply"
    )
    timeout_s: float | None = Field(
        None, gt=0, description="the batch's deadline, from its arrival"
    )
    queue_timeout_s: float | None = Field(
        None, gt=0, description="a sequence not started by then ends with the error queue_timeout"
    )
    priority: Priority = 0
    detach: bool = Field(
        False, description="answer at once with an id; GET /rollouts/{id} has the results"
    )
