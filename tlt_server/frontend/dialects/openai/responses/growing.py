"""A response as it grows: what comes of its generation goes in, numbered events come out."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any

import msgspec
from msgspec import UNSET

from tlt_server.errors import TltError
from tlt_server.frontend.dialects.openai.messages import ChatMessage
from tlt_server.frontend.dialects.openai.phrases import new_call_id, sliced
from tlt_server.frontend.dialects.openai.responses.replies import (
    CallItem,
    Cut,
    InputDetails,
    Item,
    MessageItem,
    ModelResponse,
    ResponseError,
    ResponseEvent,
    ResponseUsage,
    State,
    TextPart,
    ThoughtItem,
    ThoughtPart,
)
from tlt_server.frontend.dialects.openai.responses.requests import ResponseRequest
from tlt_server.frontend.generation.items import FinishedItem, TokenEvent
from tlt_server.frontend.http.loop_share import Turn
from tlt_server.frontend.parsers.answer import AnswerReader
from tlt_server.frontend.parsers.pieces import Piece, SpokenCall, SpokenText
from tlt_server.frontend.rollouts.responses import KeptResponse


class Writer:
    """Writes the output of one response."""

    def __init__(self) -> None:
        self.output: list[Item] = []
        self._grown: list[str] = []  # text or arguments of the last item
        self._open = False  # the last item grows

    def write(self, pieces: Iterable[Piece]) -> Iterator[ResponseEvent]:
        for piece in pieces:
            if isinstance(piece, SpokenCall):
                yield from self.close("completed")
                call = CallItem(
                    id=f"fc_{uuid.uuid4().hex}",
                    status="in_progress",
                    call_id=new_call_id(),
                    name=piece.name,
                    arguments="",
                )
                yield self._begin(call)
                yield from self._grow(piece.arguments)
                yield from self.close("completed")
            else:
                yield from self._speak(piece.text, spoken=isinstance(piece, SpokenText))

    def _speak(self, text: str, *, spoken: bool) -> Iterator[ResponseEvent]:
        kind: type[MessageItem | ThoughtItem] = MessageItem if spoken else ThoughtItem
        if not self._open or not isinstance(self.output[-1], kind):
            yield from self.close("completed")
            id = f"{'msg' if spoken else 'rs'}_{uuid.uuid4().hex}"
            yield self._begin(kind(id=id, status="in_progress", content=[]))
            part = TextPart(text="") if spoken else ThoughtPart(text="")
            yield self._event("response.content_part.added", content_index=0, part=part)
        yield from self._grow(text)

    def _begin(self, item: Item) -> ResponseEvent:
        self.output.append(item)
        self._open, self._grown = True, []
        return ResponseEvent(
            type="response.output_item.added", output_index=len(self.output) - 1, item=item
        )

    def _grow(self, text: str) -> Iterator[ResponseEvent]:
        self._grown.append(text)
        match self.output[-1]:
            case MessageItem():
                yield self._event(
                    "response.output_text.delta", content_index=0, delta=text, logprobs=[]
                )
            case ThoughtItem():
                yield self._event("response.reasoning_text.delta", content_index=0, delta=text)
            case CallItem():
                yield self._event("response.function_call_arguments.delta", delta=text)

    def close(self, status: State) -> Iterator[ResponseEvent]:
        """End the item that grows, if there is one."""
        if not self._open:
            return
        self._open, text = False, "".join(self._grown)
        match self.output[-1]:
            case MessageItem() as item:
                part = TextPart(text=text)
                item.content = [part]
                yield self._event(
                    "response.output_text.done", content_index=0, text=text, logprobs=[]
                )
                yield self._event("response.content_part.done", content_index=0, part=part)
            case ThoughtItem() as thought:
                thought.content = [ThoughtPart(text=text)]
                yield self._event("response.reasoning_text.done", content_index=0, text=text)
                yield self._event(
                    "response.content_part.done", content_index=0, part=thought.content[0]
                )
            case CallItem() as call:
                call.arguments = text
                yield self._event(
                    "response.function_call_arguments.done", arguments=text, name=call.name
                )
        self.output[-1].status = status
        yield ResponseEvent(
            type="response.output_item.done",
            output_index=len(self.output) - 1,
            item=self.output[-1],
        )

    def _event(self, type: str, **fields: object) -> ResponseEvent:
        """Return an event about the last item."""
        event = ResponseEvent(
            type=type, item_id=self.output[-1].id, output_index=len(self.output) - 1
        )
        for name, value in fields.items():
            setattr(event, name, value)
        return event


Keep = Callable[[KeptResponse], bool]  # returns whether the response is kept


class GrowingResponse:
    """A response on its way: what comes of its generation goes in, events come out."""

    def __init__(
        self,
        asked: ResponseRequest,
        id: str,
        owner: str,
        model: str,
        answer: AnswerReader | None,
        messages: list[ChatMessage],
    ) -> None:
        """`answer` reads the text, None: all of it is content. `messages`: the conversation before
        it, which `owner`, the name of the key, may continue.
        """
        self._owner, self._answer, self._messages = owner, answer, messages
        self._writer, self._number = Writer(), 0
        self.response = ModelResponse(
            id=id,
            created_at=int(time.time()),
            model=model,
            status="in_progress",
            output=self._writer.output,
            instructions=asked.instructions,
            previous_response_id=asked.previous_response_id,
            max_output_tokens=asked.max_output_tokens,
            temperature=None if asked.temperature is UNSET else asked.temperature,
            top_p=None if asked.top_p is UNSET else asked.top_p,
            tools=asked.tools,
            tool_choice=asked.tool_choice,
            parallel_tool_calls=asked.parallel_tool_calls,
            text=asked.text or {"format": {"type": "text"}},
            reasoning=asked.reasoning or {"effort": None, "summary": None},
            metadata=asked.metadata or {},
            store=asked.store,
        )

    def begin(self) -> Iterator[ResponseEvent]:
        yield from self._numbered(
            ResponseEvent(type=f"response.{name}", response=self.response)
            for name in ("created", "in_progress")
        )

    async def take(self, event: TokenEvent, turn: Turn) -> AsyncIterator[ResponseEvent]:
        """Take in what came of the choice, and yield the events of it."""
        async for text in sliced(event.delta.text or "", turn):
            pieces: list[Piece] = (
                [SpokenText(text)] if self._answer is None else self._answer.push(text)
            )
            for each in self._numbered(self._writer.write(pieces)):
                yield each
        if event.ended is not None:
            last = [] if self._answer is None else self._answer.end()
            if not self._writer.output and not last:
                last = [SpokenText("")]
            for each in self._numbered(self._writer.write(last)):
                yield each
            reason = event.ended.finish_reason
            self.response.status = "completed" if reason == "stop" else "incomplete"
            if reason != "stop":
                self.response.incomplete_details = Cut(
                    "max_output_tokens" if reason == "length" else reason
                )
            for each in self._numbered(self._writer.close(self.response.status)):
                yield each

    def finish(self, item: FinishedItem, keep: Keep) -> Iterator[ResponseEvent]:
        """Take the end in, and offer the response to be kept, if it asks for that."""
        made = sum(len(choice.token_ids) for choice in item.choices)
        self.response.usage = ResponseUsage(
            input_tokens=item.prompt_tokens,
            output_tokens=made,
            total_tokens=item.prompt_tokens + made,
            input_tokens_details=InputDetails(item.cached_tokens),
        )
        if self.response.store and not keep(self._kept()):
            self.response.store = False
        yield from self._last()

    def fail(self, error: TltError) -> Iterator[ResponseEvent]:
        self.response.status = "failed"
        self.response.error = ResponseError(error.code, error.message)
        yield from self._numbered(self._writer.close("incomplete"))
        yield from self._last()

    def _last(self) -> Iterator[ResponseEvent]:
        name = f"response.{self.response.status}"
        yield from self._numbered([ResponseEvent(type=name, response=self.response)])

    def _kept(self) -> KeptResponse:
        messages = msgspec.msgpack.encode([*self._messages, _said(self.response)])
        body = msgspec.json.encode(self.response)
        return KeptResponse(self.response.id, self._owner, messages, body)

    def _numbered(self, events: Iterable[ResponseEvent]) -> Iterator[ResponseEvent]:
        for event in events:
            event.sequence_number = self._number
            self._number += 1
            yield event


def kept_messages(kept: KeptResponse) -> list[ChatMessage]:
    """Return the conversation of a response, with its answer."""
    return msgspec.msgpack.decode(kept.messages, type=list[ChatMessage])


def _said(response: ModelResponse) -> ChatMessage:
    """Return the answer as a message of the conversation."""
    more: dict[str, Any] = {}
    content = ""
    for item in response.output:
        match item:
            case MessageItem():
                content += "".join(part.text for part in item.content)
            case ThoughtItem():
                more["reasoning_content"] = "".join(part.text for part in item.content)
            case CallItem():
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                more.setdefault("tool_calls", []).append(call)
    return ChatMessage(role="assistant", content=content, more=more)
