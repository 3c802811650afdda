"""Bodies of the OpenAI dialect and their translation to the native request, whose limits are the
only ones.

Clients send many fields that mean nothing here, so unknown ones are ignored, and null is the same
as absent.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag
from pydantic_core import from_json

from tlt_server.errors import InvalidRequest
from tlt_server.frontend.generation.batch import Words
from tlt_server.frontend.generation.requests import (
    MAX_INT32,
    Count,
    ItemFields,
    Length,
    NativeRequest,
    Priority,
    Salt,
    SamplingFields,
    Seed,
    SharedSampling,
    ShortName,
    TokenIds,
)
from tlt_server.frontend.http.bodies import read_object
from tlt_server.frontend.http.fields import (
    Model,
    Tolerant,
    checked,
    null_is_absent,
    one_of,
    without_nulls,
)

COMPLETION = Words("prompt", "prompt[{i}]", "", "")
CHAT = Words("messages", "messages", "", "")

Scalar = bool | int | float | str


async def read(model: type[Model], body: bytes) -> Model:
    content = await read_object(
        body,
        next((name for name, field in model.model_fields.items() if field.is_required()), "prompt"),
    )
    return checked(model, without_nulls(content))


class StreamOptions(Tolerant):
    include_usage: bool = Field(False, description="a last chunk with the usage of all choices")


class Asked(SharedSampling):
    """The fields that completions and chat completions share."""

    model_config = ConfigDict(extra="ignore", json_schema_extra=null_is_absent)

    model: str = Field("", description="served_model_name, or absent")
    n: Count = Field(1, description="choices per prompt")
    seed: Seed | None = Field(
        None,
        description="keys the choices' noise: the same seed gives the same tokens, here and on "
        "/generate",
    )
    top_k: int = Field(0, ge=-1, le=MAX_INT32, description="0 or -1: all tokens")
    logprobs: bool | int = Field(False, description="true, or a number of alternatives")
    prompt_logprobs: int | None = Field(
        None, description="alternatives per prompt token; -1: the whole vocabulary"
    )
    stream: bool = Field(
        False, description="server-sent chunks as tokens come, instead of one reply"
    )
    stream_options: StreamOptions = Field(
        StreamOptions(), description="what a stream has in addition"
    )
    return_token_ids: bool = Field(
        False, description="token_ids of the choices and prompt_token_ids"
    )
    return_tokens_as_token_ids: bool = Field(
        False, description="tokens in log-probs are named token_id:<id>"
    )
    return_weight_versions: bool = Field(
        False, description="which weight version computed which tokens"
    )
    cache_salt: Salt = Field(
        "", description="requests share cached prefixes only with those of the same salt"
    )
    priority: Priority = 0
    user: str = Field("", description="accepted and without effect")

    @abstractmethod
    def alternatives(self) -> int | None:
        """Return the number of alternatives per token, or None if no log-probs are reported."""

    @abstractmethod
    def length(self) -> int | None:
        """Return the limit on output tokens, or None for all that the prompt leaves."""

    def scored_prompt(self) -> int | None:
        return self.prompt_logprobs

    def native(self, prompts: list[dict[str, Any]]) -> NativeRequest:
        """Translate to the native request. `prompts` are the fields of each item that hold its
        prompt.
        """
        sampling = {
            name: getattr(self, name)
            for name in SharedSampling.model_fields.keys() & self.model_fields_set
        }
        sampling |= {
            "top_k": max(0, self.top_k),
            "logprobs": self.alternatives() or 0,
            "max_tokens": self.length(),
        }
        if self.scored_prompt() is not None:
            sampling["prompt_logprobs"] = self.scored_prompt()
        fields = {"n": self.n, "seed": self.seed, "salt": self.cache_salt}
        return NativeRequest(
            requests=[checked(ItemFields, prompt | fields) for prompt in prompts],
            sampling=checked(SamplingFields, sampling),
            stream=self.stream,
            priority=self.priority,
        )


def _kind(prompt: Any) -> str:
    """Return the form of a prompt, so that an error is about that form."""
    if not isinstance(prompt, list):
        return "str"
    first = prompt[0] if prompt else ""
    return (
        "list[list[int]]"
        if isinstance(first, list)
        else "list[int]"
        if isinstance(first, int)
        else "list[str]"
    )


Prompt = Annotated[
    Annotated[str, Tag("str")]
    | Annotated[list[str], Field(min_length=1), Tag("list[str]")]
    | Annotated[TokenIds, Tag("list[int]")]
    | Annotated[list[TokenIds], Tag("list[list[int]]")],
    Discriminator(_kind),
]


class CompletionRequest(Asked):
    prompt: Prompt = Field(description="a text, texts, token ids, or lists of these")
    max_tokens: Length = Field(16, description="the longest output; 0: only read the prompt")
    echo: bool = Field(
        False, description="the choice's text, tokens and log-probs begin with the prompt's"
    )

    def alternatives(self) -> int | None:
        if self.logprobs is True:
            return 1
        return None if self.logprobs is False else self.logprobs

    def length(self) -> int | None:
        return self.max_tokens

    def scored_prompt(self) -> int | None:
        counts = [
            count
            for count in (self.prompt_logprobs, self.alternatives() if self.echo else None)
            if count is not None
        ]
        return max(counts, default=None) if -1 not in counts else -1

    def prompts(self) -> list[str] | list[list[int]]:
        prompt: Any = self.prompt
        return [prompt] if _kind(prompt) in ("str", "list[int]") else prompt


class Part(Tolerant):
    type: Literal["text"] = Field(description="other types are refused")
    text: str = Field(description="a piece of the message")


class ChatMessage(BaseModel):
    """A message of which the template sees every field; parts of the content are joined by
    newlines.
    """

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    role: ShortName = Field(description="whose turn it is, as the chat template knows it")
    content: Annotated[
        Annotated[str | None, Tag("str")] | Annotated[list[Part], Tag("list[Part]")],
        Discriminator(lambda value: "list[Part]" if isinstance(value, list) else "str"),
    ] = Field("", description="the text of the message")

    def for_template(self) -> dict[str, Any]:
        content = (
            "\n".join(part.text for part in self.content)
            if isinstance(self.content, list)
            else self.content or ""
        )
        fields = {
            name: value for name, value in (self.model_extra or {}).items() if value is not None
        }
        if isinstance(fields.get("tool_calls"), list):
            fields["tool_calls"] = [_with_arguments(call) for call in fields["tool_calls"]]
        return {"role": self.role, "content": content, **fields}


def _with_arguments(call: Any) -> Any:
    """Return a tool call as templates read it: the arguments as an object, not as a JSON string."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        return call | {
            "function": function
            | {"arguments": from_json(function["arguments"] or "{}", allow_inf_nan=False)}
        }
    except ValueError:
        return call


Messages = Annotated[list[ChatMessage], Field(min_length=1)]


class TemplateFields(Tolerant):
    """The inputs of the chat template other than the messages."""

    model_config = ConfigDict(json_schema_extra=null_is_absent)

    tools: list[dict[str, Any]] = Field(
        default_factory=list, description="passed to the chat template"
    )
    chat_template_kwargs: dict[str, Scalar | None] = Field(
        default_factory=dict,
        description="scalars; the template sees those that it reads by name, such as "
        "enable_thinking",
    )
    add_generation_prompt: bool = Field(True, description="open the assistant's turn")

    def template_arguments(self, messages: list[ChatMessage]) -> dict[str, Any]:
        return {
            "messages": [message.for_template() for message in messages],
            "tools": self.tools or None,
            "options": {"add_generation_prompt": self.add_generation_prompt}
            | self.chat_template_kwargs,
        }


class ChatRequest(Asked, TemplateFields):
    model_config = ConfigDict(extra="ignore", json_schema_extra=null_is_absent)

    messages: Messages = Field(description="the conversation so far")
    max_tokens: Length | None = Field(
        None,
        description="absent: what the prompt leaves of the model's length; 0: only read the prompt",
    )
    max_completion_tokens: Length | None = Field(None, description="the newer name of max_tokens")
    top_logprobs: int | None = Field(None, description="alternatives per token; needs logprobs")

    def alternatives(self) -> int | None:
        if self.logprobs is False:
            if self.top_logprobs:
                raise InvalidRequest(
                    f"top_logprobs is {self.top_logprobs} and logprobs is not set; set logprobs to "
                    "true"
                )
            return None
        return (
            self.top_logprobs
            if self.top_logprobs is not None
            else int(self.logprobs)
            if self.logprobs is not True
            else 0
        )

    def length(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


def _text_or_conversation(schema: dict[str, Any]) -> None:
    null_is_absent(schema)
    schema |= one_of(("prompt", "messages"))


class TokenizeRequest(TemplateFields):
    """A text, or a conversation."""

    model_config = ConfigDict(json_schema_extra=_text_or_conversation)

    prompt: str | None = Field(None, description="a text")
    messages: Messages | None = Field(
        None, description="a conversation, put into the chat template"
    )
    add_special_tokens: bool | None = Field(
        None, description="absent: true for a text, false for a conversation"
    )
    model: str = Field("", description="served_model_name, or absent")


class DetokenizeRequest(Tolerant):
    model_config = ConfigDict(json_schema_extra=null_is_absent)

    tokens: TokenIds = Field(description="ids of the model's vocabulary")
    model: str = Field("", description="served_model_name, or absent")
