"""Items of a conversation, translated to the messages of a chat."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tlt_server.errors import InvalidRequest
from tlt_server.frontend.dialects.openai.messages import ChatMessage
from tlt_server.frontend.generation.requests import MAX_MESSAGES
from tlt_server.frontend.http.fields import shown
from tlt_server.packed import PackedText

TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal")
MAX_ROLE = 256


def messages_of(given: str | list[dict[str, Any]]) -> list[ChatMessage]:
    """Return the messages of an input. Reasoning, text and calls in a row are one message of the
    assistant. `InvalidRequest`: an item is none that is known.
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


def items_of(id: str, messages: Sequence[ChatMessage]) -> Iterator[dict[str, Any]]:
    """Yield the items of a conversation, the inverse of `messages_of`. `id`: of its response."""
    number = 0
    for message in messages:
        for item in _items(message):
            yield {"id": f"item_{number}_{id.removeprefix('resp_')}", "status": "completed", **item}
            number += 1


def _items(message: ChatMessage) -> Iterator[dict[str, Any]]:
    more, content = message.more, message.content
    text = content if isinstance(content, str) else ""
    if message.role == "tool":
        call = more.get("tool_call_id", "")
        yield {"type": "function_call_output", "call_id": call, "output": text}
        return
    if thought := more.get("reasoning_content"):
        parts = [{"type": "reasoning_text", "text": thought}]
        yield {"type": "reasoning", "summary": [], "content": parts}
    calls = more.get("tool_calls", ())
    if text or not (calls or thought):
        kind = "output_text" if message.role == "assistant" else "input_text"
        parts = [{"type": kind, "text": text}]
        yield {"type": "message", "role": message.role, "content": parts}
    for call in calls:
        yield {"type": "function_call", "call_id": call["id"], **call["function"]}


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
