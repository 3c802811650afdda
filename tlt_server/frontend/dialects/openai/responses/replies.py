"""Replies of the Responses API: the response, its output items, and the events of a stream."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Struct, UnsetType

State = Literal["in_progress", "completed", "incomplete", "failed"]
Status = Annotated[State, "incomplete: the output was cut off"]


class TextPart(Struct, kw_only=True, tag="output_text"):
    text: Annotated[str, "what was said"]
    annotations: Annotated[list[Any], "always empty"] = []
    logprobs: Annotated[list[Any], "always empty"] = []


class ThoughtPart(Struct, kw_only=True, tag="reasoning_text"):
    text: Annotated[str, "what was thought"]


class MessageItem(Struct, kw_only=True, tag="message"):
    id: Annotated[str, "of this item"]
    status: Status
    content: Annotated[list[TextPart], "one part, once its text begins"]
    role: Annotated[Literal["assistant"], "who speaks"] = "assistant"


class ThoughtItem(Struct, kw_only=True, tag="reasoning"):
    id: Annotated[str, "of this item"]
    status: Status
    content: Annotated[list[ThoughtPart], "one part, once its text begins"]
    summary: Annotated[list[Any], "always empty"] = []


class CallItem(Struct, kw_only=True, tag="function_call"):
    id: Annotated[str, "of this item"]
    status: Status
    call_id: Annotated[str, "names the call in its output"]
    name: Annotated[str, "the function"]
    arguments: Annotated[str, "JSON as the model wrote it"]


Item = MessageItem | ThoughtItem | CallItem


class InputDetails(Struct, frozen=True):
    cached_tokens: Annotated[int, "prompt tokens whose KV was there already"]


class OutputDetails(Struct, frozen=True):
    reasoning_tokens: Annotated[int, "always 0: they are not counted apart"] = 0


class ResponseUsage(Struct, frozen=True, kw_only=True):
    input_tokens: Annotated[int, "tokens of the prompt"]
    output_tokens: Annotated[int, "tokens of the output, reasoning included"]
    total_tokens: Annotated[int, "sum of both"]
    input_tokens_details: Annotated[InputDetails, "tokens not computed again"]
    output_tokens_details: Annotated[OutputDetails, "not told apart"] = OutputDetails()


class Cut(Struct, frozen=True):
    reason: Annotated[str, "max_output_tokens, or abort"]


class ResponseError(Struct, frozen=True):
    code: Annotated[str, "the kind of error"]
    message: Annotated[str, "the value, the limit and the remedy"]


class ModelResponse(Struct, kw_only=True):
    id: Annotated[str, "for `previous_response_id`"]
    created_at: Annotated[int, "Unix seconds"]
    model: Annotated[str, "the name of the served model"]
    status: Status
    output: Annotated[list[Item], "reasoning, text and calls, in order"]
    object: Annotated[Literal["response"], "the kind of reply"] = "response"
    error: Annotated[ResponseError | None, "with the status failed"] = None
    incomplete_details: Annotated[Cut | None, "with the status incomplete"] = None
    usage: Annotated[ResponseUsage | None, "once it has ended"] = None
    instructions: Annotated[str | None, "as asked"] = None
    previous_response_id: Annotated[str | None, "as asked"] = None
    max_output_tokens: Annotated[int | None, "as asked"] = None
    temperature: Annotated[float | None, "as asked, null: the default"] = None
    top_p: Annotated[float | None, "as asked, null: the default"] = None
    tools: Annotated[list[dict[str, Any]], "as asked"] = []
    tool_choice: Annotated[Any, "as asked"] = "auto"
    parallel_tool_calls: Annotated[bool, "as asked"] = True
    text: Annotated[Any, "as asked"] = None
    reasoning: Annotated[Any, "as asked"] = None
    metadata: Annotated[dict[str, Any], "as asked"] = {}
    store: Annotated[bool, "whether it can be continued and fetched"] = True
    truncation: Annotated[Literal["disabled"], "always the same"] = "disabled"


class Deleted(Struct, frozen=True):
    id: Annotated[str, "of the response"]
    object: Annotated[Literal["response"], "what it was"] = "response"
    deleted: Annotated[bool, "always true"] = True


class CancelledResponse(Struct, frozen=True):
    id: Annotated[str, "of the response, which ends with what it has"]
    object: Annotated[Literal["response"], "the kind of reply"] = "response"
    status: Annotated[Literal["cancelled"], "always the same"] = "cancelled"


class InputItems(Struct, frozen=True):
    data: Annotated[
        list[dict[str, Any]], "messages, calls, outputs of calls and reasoning, each with an id"
    ]
    first_id: Annotated[str | None, "null: there is no item"]
    last_id: Annotated[str | None, "null: there is no item"]
    has_more: Annotated[bool, "whether items follow: ask for them by `after`"]
    object: Annotated[Literal["list"], "the kind of reply"] = "list"


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
    """One event of a stream; its type determines its fields."""

    type: Annotated[str, "such as response.output_text.delta"]
    sequence_number: Annotated[int, "counts the events of a stream from 0"] = 0
    response: Annotated[ModelResponse | UnsetType, "of the response as a whole"] = UNSET
    output_index: Annotated[int | UnsetType, "which item"] = UNSET
    item: Annotated[Item | UnsetType, "an item that begins or ends"] = UNSET
    item_id: Annotated[str | UnsetType, "id of the item"] = UNSET
    content_index: Annotated[int | UnsetType, "which part; always 0"] = UNSET
    part: Annotated[TextPart | ThoughtPart | UnsetType, "a part that begins or ends"] = UNSET
    delta: Annotated[str | UnsetType, "what was added"] = UNSET
    text: Annotated[str | UnsetType, "the whole text"] = UNSET
    arguments: Annotated[str | UnsetType, "the whole arguments"] = UNSET
    name: Annotated[str | UnsetType, "the function"] = UNSET
    logprobs: Annotated[list[Any] | UnsetType, "always empty"] = UNSET
