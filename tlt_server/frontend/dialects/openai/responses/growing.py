"""A response during its generation: takes token events, returns frames of numbered events.

A reply in one part is made by the same code, so it has the items of the stream.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable
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
from tlt_server.frontend.generation.delivery import event_frame
from tlt_server.frontend.generation.items import FinishedItem, TokenEvent
from tlt_server.frontend.http.slices import Turn
from tlt_server.frontend.parsers.answer import AnswerReader
from tlt_server.frontend.parsers.pieces import Piece, SpokenCall, SpokenText
from tlt_server.frontend.rollouts.responses import KeptResponse

Keep = Callable[[KeptResponse], bool]  # returns whether the response is kept


class GrowingResponse:
    """A response in progress. Events are encoded at once, as their items change later."""

    def __init__(
        self,
        asked: ResponseRequest,
        id: str,
        owner: str,
        model: str,
        answer: AnswerReader | None,
        messages: list[ChatMessage],
    ) -> None:
        """`answer`: reads the text; None: all of it is content. `messages`: the conversation before
        the response. `owner`: name of the API key that may continue it.
        """
        self._owner, self._answer, self._messages = owner, answer, messages
        self._streams, self._number, self._frames = asked.stream, 0, list[bytes]()
        self._output = list[Item]()
        self._grown: list[str] | None = None  # text or arguments of the last item while it grows
        self.response = ModelResponse(
            id=id,
            created_at=int(time.time()),
            model=model,
            status="in_progress",
            output=self._output,
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

    def frames(self) -> list[bytes]:
        """Return the frames of a stream since the last call."""
        frames, self._frames = self._frames, []
        return frames

    def begin(self) -> None:
        for name in ("created", "in_progress"):
            self._say(name, response=self.response)

    async def take(self, event: TokenEvent, turn: Turn) -> None:
        """Add new tokens of the choice."""
        async for text in sliced(event.delta.text or "", turn):
            self._write([SpokenText(text)] if self._answer is None else self._answer.push(text))
        if event.ended is None:
            return
        last = [] if self._answer is None else self._answer.end()
        self._write(last if self._output or last else [SpokenText("")])
        reason = event.ended.finish_reason
        self.response.status = "completed" if reason == "stop" else "incomplete"
        if reason != "stop":
            self.response.incomplete_details = Cut(
                "max_output_tokens" if reason == "length" else reason
            )
        self._close(self.response.status)

    def finish(self, item: FinishedItem, keep: Keep) -> None:
        """Add the end, and offer the response for keeping, if it requests that."""
        made = sum(len(choice.token_ids) for choice in item.choices)
        self.response.usage = ResponseUsage(
            input_tokens=item.prompt_tokens,
            output_tokens=made,
            total_tokens=item.prompt_tokens + made,
            input_tokens_details=InputDetails(item.cached_tokens),
        )
        if self.response.store and not keep(self._kept()):
            self.response.store = False
        self._say(self.response.status, response=self.response)

    def fail(self, error: TltError) -> None:
        self.response.status = "failed"
        self.response.error = ResponseError(error.code, error.message)
        self._close("incomplete")
        self._say(self.response.status, response=self.response)

    def _kept(self) -> KeptResponse:
        messages = msgspec.msgpack.encode([*self._messages, _said(self.response)])
        body = msgspec.json.encode(self.response)
        return KeptResponse(self.response.id, self._owner, messages, body)

    def _write(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            if isinstance(piece, SpokenCall):
                self._begin(
                    CallItem(
                        id=f"fc_{uuid.uuid4().hex}",
                        status="in_progress",
                        call_id=new_call_id(),
                        name=piece.name,
                        arguments="",
                    )
                )
                self._grow(piece.arguments)
                self._close("completed")
                continue
            spoken = isinstance(piece, SpokenText)
            kind: type[MessageItem | ThoughtItem] = MessageItem if spoken else ThoughtItem
            if self._grown is None or not isinstance(self._output[-1], kind):
                id = f"{'msg' if spoken else 'rs'}_{uuid.uuid4().hex}"
                self._begin(kind(id=id, status="in_progress", content=[]))
                part = TextPart(text="") if spoken else ThoughtPart(text="")
                self._tell("content_part.added", content_index=0, part=part)
            self._grow(piece.text)

    def _begin(self, item: Item) -> None:
        self._close("completed")
        self._output.append(item)
        self._grown = []
        self._say("output_item.added", output_index=len(self._output) - 1, item=item)

    def _grow(self, text: str) -> None:
        assert self._grown is not None
        self._grown.append(text)
        match self._output[-1]:
            case MessageItem():
                self._tell("output_text.delta", content_index=0, delta=text, logprobs=[])
            case ThoughtItem():
                self._tell("reasoning_text.delta", content_index=0, delta=text)
            case CallItem():
                self._tell("function_call_arguments.delta", delta=text)

    def _close(self, status: State) -> None:
        """End the open item, if there is one."""
        if self._grown is None:
            return
        text, self._grown = "".join(self._grown), None
        match self._output[-1]:
            case MessageItem() as item:
                item.content = [TextPart(text=text)]
                self._tell("output_text.done", content_index=0, text=text, logprobs=[])
                self._tell("content_part.done", content_index=0, part=item.content[0])
            case ThoughtItem() as thought:
                thought.content = [ThoughtPart(text=text)]
                self._tell("reasoning_text.done", content_index=0, text=text)
                self._tell("content_part.done", content_index=0, part=thought.content[0])
            case CallItem() as call:
                call.arguments = text
                self._tell("function_call_arguments.done", arguments=text, name=call.name)
        last = self._output[-1]
        last.status = status
        self._say("output_item.done", output_index=len(self._output) - 1, item=last)

    def _tell(self, kind: str, **fields: Any) -> None:
        """Add an event about the last item."""
        number = len(self._output) - 1
        self._say(kind, item_id=self._output[-1].id, output_index=number, **fields)

    def _say(self, kind: str, **fields: Any) -> None:
        if self._streams:
            type = f"response.{kind}"
            event = ResponseEvent(type=type, sequence_number=self._number, **fields)
            self._frames.append(event_frame(event, type))
            self._number += 1


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
