"""Bodies of the OpenAI dialect and their translation to the native request, whose limits are the
only ones.

Clients send many fields without meaning here, so unknown fields are ignored, and null counts as
absent. `known_fields` lists the fields that are refused instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from msgspec import Meta, UnsetType

from tlt_client.fields import Alternatives, Count, Length, Priority, SessionId, ShortName, Train
from tlt_server.errors import InvalidRequest
from tlt_server.frontend.dialects import known_fields
from tlt_server.frontend.dialects.borrowed import AskedModel, BothStructured, CacheSalt
from tlt_server.frontend.dialects.openai.messages import (
    ChatMessage,
    Choice,
    Messages,
    Parallel,
    Tools,
    check_tools,
)
from tlt_server.frontend.generation.requests import (
    ITEMS,
    AnySeed,
    NativeRequest,
    PromptIds,
    PromptReading,
    SamplingFields,
    StructuredOutputs,
    Truncation,
    Words,
    items_of,
)
from tlt_server.frontend.http.counting import Limit
from tlt_server.frontend.http.fields import RefusedField, Tolerant
from tlt_server.wire.packed import PackedIds

COMPLETION = Words("prompt[{i}]", "", "", clamps=True)
CHAT = Words("messages", "", "", renamed={"logprobs": "top_logprobs"}, clamps=True)
MAX_TEMPLATE = 2**16  # characters
MAX_OPTIONS = 64  # limit on the options of a chat template

Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Scalar = bool | Int64 | float | str


class StreamOptions(Tolerant, frozen=True, kw_only=True):
    include_usage: Annotated[bool, "a last chunk with the usage of all choices"] = False
    continuous_usage_stats: Annotated[
        bool, "with include_usage: each chunk has the usage so far"
    ] = False


class Asked(BothStructured, Tolerant, frozen=True, kw_only=True):
    """The fields that completions and chat completions share."""

    model: AskedModel = ""
    n: Annotated[Count, "choices per prompt"] = 1
    seed: Annotated[
        AnySeed | None,
        "keys the choices' noise: the same seed gives the same tokens, here and on /generate",
    ] = None
    logprobs: Annotated[bool | Length, "true, or a number of alternatives"] = False
    prompt_logprobs: Annotated[
        Alternatives | None, "alternatives per prompt token; -1: the whole vocabulary"
    ] = None
    stream: Annotated[bool, "server-sent chunks as tokens come, instead of one reply"] = False
    stream_options: Annotated[StreamOptions, "what a stream has in addition"] = StreamOptions()
    return_token_ids: Annotated[bool, "token_ids of the choices and prompt_token_ids"] = False
    return_tokens_as_token_ids: Annotated[bool, "tokens in log-probs are named token_id:<id>"] = (
        False
    )
    return_weight_versions: Annotated[bool, "which weight version computed which tokens"] = False
    include_stop_str_in_output: Annotated[
        bool, "the text keeps the stop string or token that ended it"
    ] = False
    truncate_prompt_tokens: Truncation = None
    add_special_tokens: Annotated[
        bool | None,
        "texts get the tokenizer's special tokens; absent: true for completions, false for chat",
    ] = None
    cache_salt: CacheSalt = ""
    priority: Priority = 0
    train: Train = True
    session_id: SessionId = None
    request_id: Annotated[
        ShortName | None,
        "names the request for POST /abort_requests and in the reply's id; absent: the header "
        "X-Request-Id",
    ] = None

    def alternatives(self) -> int | None:
        """Return the number of alternatives per token, or None if no log-probs are reported."""
        raise NotImplementedError

    def length(self) -> int | None:
        """Return the limit on output tokens, or None for everything that the prompt leaves."""
        raise NotImplementedError

    def scored_prompt(self) -> int | None:
        return self.prompt_logprobs

    def reading(self) -> PromptReading:
        return PromptReading(self.add_special_tokens is not False, self.truncate_prompt_tokens)

    def native(
        self,
        prompts: Sequence[str | PackedIds],
        structure: StructuredOutputs | UnsetType,
        lora: str,
    ) -> NativeRequest:
        """Translate to the native request, with one item per prompt, computed with the adapter
        `lora`.
        """
        return NativeRequest(
            requests=items_of(
                prompts,
                self.seed,
                [lora] * len(prompts),
                n=self.n,
                salt=self.cache_salt,
                train=self.train,
                group_id=self.session_id,
            ),
            sampling=SamplingFields(
                **self.shared(),
                logprobs=self.alternatives() or 0,
                max_tokens=self.length(),
                prompt_logprobs=self.scored_prompt(),
                include_stop_str_in_output=self.include_stop_str_in_output,
                structured_outputs=structure,
            ),
            stream=self.stream,
            priority=self.priority,
        )


class CompletionRequest(Asked, frozen=True, kw_only=True):
    refused: ClassVar[Mapping[str, RefusedField]] = known_fields.refused(known_fields.COMPLETIONS)

    prompt: Annotated[
        str
        | PromptIds
        | Annotated[list[str | PromptIds], Meta(min_length=1, extra={"limit": ITEMS})],
        "a text, texts, token ids, or lists of these",
    ]
    max_tokens: Annotated[Length, "the longest output; 0: only read the prompt"] = 16
    echo: Annotated[bool, "the choice's text, tokens and log-probs begin with the prompt's"] = False

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

    def prompts(self) -> list[str | PackedIds]:
        return self.prompt if isinstance(self.prompt, list) else [self.prompt]


Effort = Annotated[ShortName | None, "the template sees it, if it reads reasoning_effort"]
Verbosity = Annotated[ShortName | None, "the template sees it, if it reads verbosity"]
Template = Annotated[
    Annotated[str, Meta(max_length=MAX_TEMPLATE)] | None,
    "the name of one of the model's, or one in its place, where the server has allow_chat_template",
]
OpenTurn = Annotated[
    bool | None, "open the assistant's turn; absent: unless the final message is continued"
]
OpenEnd = Annotated[bool, "leave the final message open, to be continued"]
Options = Annotated[
    dict[str, Scalar | None],
    "scalars; the template sees those that it reads by name, such as enable_thinking",
    Meta(max_length=MAX_OPTIONS),
]


class ChatRequest(Asked, frozen=True, kw_only=True):
    refused: ClassVar[Mapping[str, RefusedField]] = known_fields.refused(known_fields.CHAT)

    messages: Annotated[Messages, "the conversation so far"]
    max_tokens: Annotated[
        Length | None,
        "absent: what the prompt leaves of the model's length; 0: only read the prompt",
    ] = None
    max_completion_tokens: Annotated[Length | None, "the newer name of max_tokens"] = None
    tools: Tools = []
    chat_template: Template = None
    chat_template_kwargs: Options = {}
    add_generation_prompt: OpenTurn = None
    continue_final_message: OpenEnd = False
    reasoning_effort: Effort = None
    verbosity: Verbosity = None
    tool_choice: Choice = "auto"
    parallel_tool_calls: Parallel = True
    include_reasoning: Annotated[bool, "false: reasoning is left out"] = True
    separate_reasoning: Annotated[bool, "false: reasoning stays in the content"] = True
    top_logprobs: Annotated[Length | None, "alternatives per token; needs logprobs"] = None
    input_ids: Annotated[
        PromptIds | None, "the prompt's tokens, in place of the chat template's"
    ] = None
    return_prompt_token_ids: Annotated[bool, "prompt_token_ids of the choices"] = False
    return_meta_info: Annotated[
        bool, "meta_info of the choices as SGLang has it, and no content that is null"
    ] = False

    @property
    def words(self) -> Words:
        """Return the client's names of the fields that the prompt is made from."""
        return CHAT if self.input_ids is None else CHAT._replace(item="input_ids")

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

    def shown_tools(self) -> list[dict[str, Any]]:
        check_tools(self.tools)
        return [] if self.tool_choice == "none" else self.tools


class TokenizeRequest(Tolerant, frozen=True, kw_only=True):
    """A text, or a conversation."""

    exactly_one: ClassVar[tuple[str, ...]] = ("prompt", "messages")
    refused: ClassVar[Mapping[str, RefusedField]] = known_fields.refused(known_fields.TOKENIZE)

    prompt: Annotated[str | None, "a text"] = None
    messages: Annotated[Messages | None, "a conversation, put into the chat template"] = None
    tools: Tools = []
    chat_template: Template = None
    chat_template_kwargs: Options = {}
    add_generation_prompt: OpenTurn = None
    continue_final_message: OpenEnd = False
    reasoning_effort: Effort = None
    verbosity: Verbosity = None
    add_special_tokens: Annotated[
        bool | None, "absent: true for a text, false for a conversation"
    ] = None
    model: AskedModel = ""

    def shown_tools(self) -> list[dict[str, Any]]:
        """Return the tools. `InvalidRequest` if they are not functions."""
        check_tools(self.tools)
        return self.tools


def template_arguments(
    asked: ChatRequest | TokenizeRequest, messages: list[ChatMessage]
) -> dict[str, Any]:
    """Return the arguments of `tokenizing.render`."""
    continues, opens = asked.continue_final_message, asked.add_generation_prompt
    if continues and opens:
        raise InvalidRequest(
            "continue_final_message is true and so is add_generation_prompt; a final message "
            "that is continued has no turn after it: set one of them"
        )
    options = {
        "add_generation_prompt": not continues if opens is None else opens,
        "reasoning_effort": asked.reasoning_effort,
        "verbosity": asked.verbosity,
    }
    return {
        "messages": messages,
        "tools": asked.shown_tools() or None,
        "options": {name: value for name, value in options.items() if value is not None}
        | asked.chat_template_kwargs,
        "open_end": continues,
        "template": asked.chat_template,
    }


class DetokenizeRequest(Tolerant, frozen=True, kw_only=True):
    tokens: Annotated[
        PackedIds,
        "ids of the model's vocabulary",
        Meta(extra={"limit": Limit("max_model_len", "ids", "send them in parts")}),
    ]
    model: AskedModel = ""
