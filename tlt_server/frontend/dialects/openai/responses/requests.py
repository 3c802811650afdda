"""The body of `POST /v1/responses`, and its translation to a chat request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from tlt_client.fields import Json, Length, Priority, Salt, ShortName, Train
from tlt_server.errors import InvalidRequest
from tlt_server.frontend.dialects import known_fields
from tlt_server.frontend.dialects.openai.messages import ChatMessage
from tlt_server.frontend.dialects.openai.requests import ChatRequest, Effort, Options, Verbosity
from tlt_server.frontend.dialects.openai.tools import (
    NamedFunction,
    NamedTool,
    Parallel,
    check_tools,
)
from tlt_server.frontend.dialects.structures import JsonSchemaFormat, ResponseFormat
from tlt_server.frontend.generation.batch import Words
from tlt_server.frontend.generation.requests import AnySeed, SharedSampling, TopK
from tlt_server.frontend.http.fields import RefusedField, Tolerant

RENAMED = {"max_tokens": "max_output_tokens", "response_format": "text.format"}
RESPONSE = Words("input", "", "", renamed=RENAMED, clamps=True)


class TextFormat(Tolerant, frozen=True, kw_only=True):
    type: Annotated[Literal["text", "json_object", "json_schema"], "text: no structure"] = "text"
    schema: Annotated[Json | None, "with the type json_schema"] = None
    name: Annotated[str, "has no effect", Meta(max_length=256)] = ""

    def for_chat(self) -> ResponseFormat | None:
        if self.type == "json_schema":
            if self.schema is None:
                raise InvalidRequest(
                    "text.format has the type json_schema and no schema; give it one"
                )
            return ResponseFormat(type=self.type, json_schema=JsonSchemaFormat(schema=self.schema))
        return ResponseFormat(type=self.type)


class TextOptions(Tolerant, frozen=True, kw_only=True):
    format: Annotated[TextFormat | None, "what the text looks like"] = None
    verbosity: Verbosity = None


class ReasoningOptions(Tolerant, frozen=True, kw_only=True):
    effort: Effort = None


class NamedChoice(Tolerant, frozen=True, kw_only=True):
    type: Annotated[Literal["function"], "the kind of tool"]
    name: Annotated[ShortName, "the function to call"]


class ResponseRequest(SharedSampling, Tolerant, frozen=True, kw_only=True):
    refused: ClassVar[Mapping[str, RefusedField]] = known_fields.refused(known_fields.RESPONSES)

    input: Annotated[
        str | list[dict[str, Any]], "a text, or items: messages, calls, outputs of calls, reasoning"
    ]
    model: Annotated[str, "served_model_name, a LoRA adapter that is loaded, or absent"] = ""
    instructions: Annotated[
        str | None, "a system message before the input; is not carried over"
    ] = None
    previous_response_id: Annotated[ShortName | None, "the response that this one continues"] = None
    store: Annotated[bool, "keep it, to be continued and fetched"] = True
    stream: Annotated[bool, "typed events as tokens come"] = False
    max_output_tokens: Annotated[
        Length | None, "absent: what the prompt leaves of the model's length"
    ] = None
    text: Annotated[TextOptions | None, "the form of the text"] = None
    tools: Annotated[
        list[dict[str, Any]],
        'functions: `{"type": "function", "name", "description", "parameters"}`',
    ] = []
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | NamedChoice,
        "as in chat completions; a function by its name",
    ] = "auto"
    parallel_tool_calls: Parallel = True
    reasoning: Annotated[ReasoningOptions | None, "how much to think"] = None
    chat_template_kwargs: Options = {}
    metadata: Annotated[dict[str, Any] | None, "comes back"] = None
    top_k: TopK = 0
    seed: Annotated[AnySeed | None, "the same seed gives the same tokens"] = None
    cache_salt: Annotated[
        Salt, "requests share cached prefixes only with those of the same salt"
    ] = ""
    priority: Priority = 0
    train: Train = True
    request_id: Annotated[ShortName | None, "names the request for POST /abort_requests"] = None

    def for_chat(self, messages: list[ChatMessage]) -> ChatRequest:
        """Return the chat request with these messages."""
        check_tools(self.tools)
        choice: Any = self.tool_choice
        if isinstance(choice, NamedChoice):
            choice = NamedTool(function=NamedFunction(name=choice.name))
        format = self.text.format.for_chat() if self.text and self.text.format else None
        return ChatRequest(
            **self.shared(),
            messages=messages,
            model=self.model,
            max_completion_tokens=self.max_output_tokens,
            tools=[_nested(tool) for tool in self.tools],
            tool_choice=choice,
            parallel_tool_calls=self.parallel_tool_calls,
            response_format=format,
            reasoning_effort=self.reasoning.effort if self.reasoning else None,
            verbosity=self.text.verbosity if self.text else None,
            chat_template_kwargs=self.chat_template_kwargs,
            stream=self.stream,
            seed=self.seed,
            top_k=self.top_k,
            cache_salt=self.cache_salt,
            priority=self.priority,
            train=self.train,
        )


def _nested(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool as chat templates know it."""
    if "function" in tool:
        return tool
    return {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}
