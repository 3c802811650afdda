"""The body of `POST /v1/responses`, and its translation to a chat request."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from tlt_client.fields import Json, Length, Priority, SessionId, ShortName, Train
from tlt_server.errors import InvalidRequest
from tlt_server.frontend.dialects import known_fields
from tlt_server.frontend.dialects.borrowed import (
    AskedModel,
    CacheSalt,
    JsonSchemaFormat,
    ResponseFormat,
)
from tlt_server.frontend.dialects.openai.messages import (
    ChatMessage,
    NamedFunction,
    NamedTool,
    Parallel,
    check_tools,
)
from tlt_server.frontend.dialects.openai.requests import ChatRequest, Effort, Options, Verbosity
from tlt_server.frontend.generation.requests import MAX_MESSAGES, AnySeed, BorrowedSampling, Words
from tlt_server.frontend.http.fields import RefusedField, Tolerant, shown
from tlt_server.wire.packed import PackedText

TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal")
MAX_ROLE = 256
MAX_DIGITS = 9  # the longest number of an item


def messages_of(given: str | list[dict[str, Any]]) -> list[ChatMessage]:
    """Return the messages of an input. Adjacent reasoning, text and calls form one message of the
    assistant. `InvalidRequest` for an unknown kind of item.
    """
    if isinstance(given, str | PackedText):
        return [ChatMessage(role="user", content=_string("input", given))]
    if not 0 < len(given) <= MAX_MESSAGES:
        raise InvalidRequest(
            f"input has {len(given)} items; it must have from 1 to {MAX_MESSAGES}: send the newest"
        )
    found: list[ChatMessage] = []
    open_turn: dict[str, Any] | None = None  # the assistant's
    for i, item in enumerate(given):
        role, fields = _read(f"input[{i}]", item)
        if role != "assistant":
            found += _closed(open_turn)
            open_turn = None
            content = fields.pop("content")
            found.append(ChatMessage(role=role, content=content, more=fields))
            continue
        if open_turn is not None and "content" in fields and "content" in open_turn:
            found += _closed(open_turn)
            open_turn = None
        open_turn = open_turn or {}
        calls = [*open_turn.get("tool_calls", ()), *fields.pop("tool_calls", ())]
        open_turn |= fields | ({"tool_calls": calls} if calls else {})
    return [*found, *_closed(open_turn)]


class Conversation:
    """The items of a conversation, the inverse of `messages_of`. Each is created when it is
    read.
    """

    def __init__(self, id: str, messages: Iterable[ChatMessage]) -> None:
        """`id`: of the response that the conversation belongs to."""
        self._suffix = id.removeprefix("resp_")
        self._parts = [part for message in messages for part in _parts(message)]

    def __len__(self) -> int:
        return len(self._parts)

    def id_of(self, number: int) -> str:
        return f"item_{number}_{self._suffix}"

    def number_of(self, id: str) -> int | None:
        """Return the number of an item, None if there is no such item."""
        number = id.removeprefix("item_").removesuffix(f"_{self._suffix}")
        if not number.isdecimal() or len(number) > MAX_DIGITS:
            return None
        return int(number) if int(number) < len(self) and id == self.id_of(int(number)) else None

    def __getitem__(self, number: int) -> dict[str, Any]:
        part = self._parts[number]
        return {"id": self.id_of(number), "status": "completed", **_item(*part)}


def _parts(message: ChatMessage) -> Iterator[tuple[str, Any]]:
    """Yield the kind and content of each item of a message."""
    more, content = message.more, message.content
    text = content if isinstance(content, str) else ""
    if message.role == "tool":
        yield "function_call_output", (more.get("tool_call_id", ""), text)
        return
    if thought := more.get("reasoning_content"):
        yield "reasoning", thought
    calls = more.get("tool_calls", ())
    if text or not (calls or thought):
        yield "message", (message.role, text)
    for call in calls:
        yield "function_call", call


def _item(kind: str, value: Any) -> dict[str, Any]:
    match kind, value:
        case "function_call_output", (call, text):
            return {"type": kind, "call_id": call, "output": text}
        case "reasoning", thought:
            parts = [{"type": "reasoning_text", "text": thought}]
            return {"type": kind, "summary": [], "content": parts}
        case "message", (role, text):
            part = "output_text" if role == "assistant" else "input_text"
            return {"type": kind, "role": role, "content": [{"type": part, "text": text}]}
    return {"type": kind, "call_id": value["id"], **value["function"]}


def _closed(turn: dict[str, Any] | None) -> Iterator[ChatMessage]:
    if turn:
        content = turn.pop("content", "")
        yield ChatMessage(role="assistant", content=content, more=turn)


def _read(where: str, item: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the role of an item, and the fields of its message."""
    match item.get("type", "message"):
        case "message":
            role = item.get("role")
            if not isinstance(role, str) or not 0 < len(role) <= MAX_ROLE:
                raise InvalidRequest(
                    f"{where}.role is {shown(role)}; it must be a role such as user"
                )
            return role, {"content": _text(f"{where}.content", item.get("content"))}
        case "function_call":
            function = {
                "name": _string(f"{where}.name", item.get("name")),
                "arguments": _string(f"{where}.arguments", item.get("arguments")),
            }
            id = _string(f"{where}.call_id", item.get("call_id"))
            return "assistant", {
                "tool_calls": [{"id": id, "type": "function", "function": function}]
            }
        case "function_call_output":
            return "tool", {
                "content": _text(f"{where}.output", item.get("output")),
                "tool_call_id": _string(f"{where}.call_id", item.get("call_id")),
            }
        case "reasoning":
            parts = item.get("content") or item.get("summary") or ""
            return "assistant", {"reasoning_content": _text(f"{where}.content", parts)}
    raise InvalidRequest(
        f"{where}.type is {shown(item.get('type'))}; it must be message, function_call, "
        "function_call_output or reasoning"
    )


def _string(where: str, value: Any) -> str:
    if isinstance(value, PackedText):
        return value.whole()
    if not isinstance(value, str):
        raise InvalidRequest(f"{where} is {shown(value)}; it must be a string")
    return value


def _text(where: str, value: Any) -> str:
    """Return the text of a string or of parts of text, joined by newlines as in chats."""
    if isinstance(value, str | PackedText):
        return _string(where, value)
    if not isinstance(value, list):
        raise InvalidRequest(f"{where} is {shown(value)}; it must be a string or a list of texts")
    texts = []
    for i, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") not in TEXTS:
            kind = part.get("type") if isinstance(part, dict) else part
            raise InvalidRequest(
                f"{where}[{i}].type is {shown(kind)}; this server reads and writes text only: it "
                f"must be one of {', '.join(TEXTS)}"
            )
        name = "refusal" if part["type"] == "refusal" else "text"
        texts.append(_string(f"{where}[{i}].{name}", part.get(name)))
    return "\n".join(texts)


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


class ResponseRequest(BorrowedSampling, Tolerant, frozen=True, kw_only=True):
    refused: ClassVar[Mapping[str, RefusedField]] = known_fields.refused(known_fields.RESPONSES)

    input: Annotated[
        str | list[dict[str, Any]], "a text, or items: messages, calls, outputs of calls, reasoning"
    ]
    model: AskedModel = ""
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
    seed: Annotated[AnySeed | None, "the same seed gives the same tokens"] = None
    cache_salt: CacheSalt = ""
    priority: Priority = 0
    train: Train = True
    session_id: SessionId = None
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
            cache_salt=self.cache_salt,
            priority=self.priority,
            train=self.train,
            session_id=self.session_id,
        )


def _nested(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool as chat templates know it."""
    if "function" in tool:
        return tool
    return {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}
