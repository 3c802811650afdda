"""Replies of the Responses API: the response, its output items, and the events of a stream."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

State = Literal["in_progress", "completed", "incomplete", "failed"]
Status = Annotated[State, Meta(description="incomplete: the output was cut off")]


class TextPart(Struct, kw_only=True, tag="output_text"):
    text: Annotated[str, Meta(description="what was said")]
    annotations: Annotated[list[Any], Meta(description="always empty")] = []
    logprobs: Annotated[list[Any], Meta(description="always empty")] = []


class ThoughtPart(Struct, kw_only=True, tag="reasoning_text"):
    text: Annotated[str, Meta(description="what was thought")]


class MessageItem(Struct, kw_only=True, tag="message"):
    id: Annotated[str, Meta(description="of this item")]
    status: Status
    content: Annotated[list[TextPart], Meta(description="one part, once its text begins")]
    role: Annotated[Literal["assistant"], Meta(description="who speaks")] = "assistant"


class ThoughtItem(Struct, kw_only=True, tag="reasoning"):
    id: Annotated[str, Meta(description="of this item")]
    status: Status
    content: Annotated[list[ThoughtPart], Meta(description="one part, once its text begins")]
    summary: Annotated[list[Any], Meta(description="always empty")] = []


class CallItem(Struct, kw_only=True, tag="function_call"):
    id: Annotated[str, Meta(description="of this item")]
    status: Status
    call_id: Annotated[str, Meta(description="names the call in its output")]
    name: Annotated[str, Meta(description="the function")]
    arguments: Annotated[str, Meta(description="JSON as the model wrote it")]


Item = MessageItem | ThoughtItem | CallItem


class InputDetails(Struct, frozen=True):
    cached_tokens: Annotated[int, Meta(description="prompt tokens whose KV was there already")]


class OutputDetails(Struct, frozen=True):
    reasoning_tokens: Annotated[int, Meta(description="always 0: they are not counted apart")] = 0


class ResponseUsage(Struct, frozen=True, kw_only=True):
    input_tokens: Annotated[int, Meta(description="tokens of the prompt")]
    output_tokens: Annotated[int, Meta(description="tokens of the output, reasoning included")]
    total_tokens: Annotated[int, Meta(description="sum of both")]
    input_tokens_details: Annotated[InputDetails, Meta(description="tokens not computed again")]
    output_tokens_details: Annotated[OutputDetails, Meta(description="not told apart")] = (
        OutputDetails()
    )


class Cut(Struct, frozen=True):
    reason: Annotated[str, Meta(description="max_output_tokens, or abort")]


class ResponseError(Struct, frozen=True):
    code: Annotated[str, Meta(description="the kind of error")]
    message: Annotated[str, Meta(description="the value, the limit and the remedy")]


class ModelResponse(Struct, kw_only=True):
    id: Annotated[str, Meta(description="for `previous_response_id`")]
    created_at: Annotated[int, Meta(description="Unix seconds")]
    model: Annotated[str, Meta(description="the name of the served model")]
    status: Status
    output: Annotated[list[Item], Meta(description="reasoning, text and calls, in order")]
    object: Annotated[Literal["response"], Meta(description="the kind of reply")] = "response"
    error: Annotated[ResponseError | None, Meta(description="with the status failed")] = None
    incomplete_details: Annotated[Cut | None, Meta(description="with the status incomplete")] = None
    usage: Annotated[ResponseUsage | None, Meta(description="once it has ended")] = None
    instructions: Annotated[str | None, Meta(description="as asked")] = None
    previous_response_id: Annotated[str | None, Meta(description="as asked")] = None
    max_output_tokens: Annotated[int | None, Meta(description="as asked")] = None
    temperature: Annotated[float | None, Meta(description="as asked, null: the default")] = None
    top_p: Annotated[float | None, Meta(description="as asked, null: the default")] = None
    tools: Annotated[list[dict[str, Any]], Meta(description="as asked")] = []
    tool_choice: Annotated[Any, Meta(description="as asked")] = "auto"
    parallel_tool_calls: Annotated[bool, Meta(description="as asked")] = True
    text: Annotated[Any, Meta(description="as asked")] = None
    reasoning: Annotated[Any, Meta(description="as asked")] = None
    metadata: Annotated[dict[str, Any], Meta(description="as asked")] = {}
    store: Annotated[bool, Meta(description="whether it can be continued and fetched")] = True
    truncation: Annotated[Literal["disabled"], Meta(description="always the same")] = "disabled"


class Deleted(Struct, frozen=True):
    id: Annotated[str, Meta(description="of the response")]
    object: Annotated[Literal["response"], Meta(description="what it was")] = "response"
    deleted: Annotated[bool, Meta(description="always true")] = True


class CancelledResponse(Struct, frozen=True):
    id: Annotated[str, Meta(description="of the response, which ends with what it has")]
    object: Annotated[Literal["response"], Meta(description="the kind of reply")] = "response"
    status: Annotated[Literal["cancelled"], Meta(description="always the same")] = "cancelled"


class InputItems(Struct, frozen=True):
    data: Annotated[
        list[dict[str, Any]],
        Meta(description="messages, calls, outputs of calls and reasoning, each with an id"),
    ]
    first_id: Annotated[str | None, Meta(description="null: there is no item")]
    last_id: Annotated[str | None, Meta(description="null: there is no item")]
    has_more: Annotated[bool, Meta(description="whether items follow: ask for them by `after`")]
    object: Annotated[Literal["list"], Meta(description="the kind of reply")] = "list"


EVENTS = (
    *(f"response.{state}" for state in ("created", "in_progress", "completed", "incomplete")),
    "response.failed",
    "response.output_item.added",
    "response.output_item.done",
    "response.content_part.added",
    "response.content_part.done",
    "response.output_text.delta",
    "response.output_text.done",
    "response.reasoning_text.delta",
    "response.reasoning_text.done",
    "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
)


class ResponseEvent(Struct, kw_only=True):
    """One event of a stream; which fields it has follows from its type."""

    type: Annotated[str, Meta(description="such as response.output_text.delta")]
    sequence_number: Annotated[int, Meta(description="counts the events of a stream from 0")] = 0
    response: Annotated[
        ModelResponse | UnsetType, Meta(description="of the response as a whole")
    ] = UNSET
    output_index: Annotated[int | UnsetType, Meta(description="which item")] = UNSET
    item: Annotated[Item | UnsetType, Meta(description="an item that begins or ends")] = UNSET
    item_id: Annotated[str | UnsetType, Meta(description="id of the item")] = UNSET
    content_index: Annotated[int | UnsetType, Meta(description="which part; always 0")] = UNSET
    part: Annotated[
        TextPart | ThoughtPart | UnsetType, Meta(description="a part that begins or ends")
    ] = UNSET
    delta: Annotated[str | UnsetType, Meta(description="what was added")] = UNSET
    text: Annotated[str | UnsetType, Meta(description="the whole text")] = UNSET
    arguments: Annotated[str | UnsetType, Meta(description="the whole arguments")] = UNSET
    name: Annotated[str | UnsetType, Meta(description="the function")] = UNSET
    logprobs: Annotated[list[Any] | UnsetType, Meta(description="always empty")] = UNSET
