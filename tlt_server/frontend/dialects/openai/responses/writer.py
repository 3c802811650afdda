"""Pieces of an answer turned into output items, and into the events that tell how they grow.

A reply in one part is made by the same code, so it has the items of the stream.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator

from tlt_server.frontend.dialects.openai.responses.replies import (
    CallItem,
    Item,
    MessageItem,
    ResponseEvent,
    State,
    TextPart,
    ThoughtItem,
    ThoughtPart,
)
from tlt_server.frontend.dialects.openai.speaker import new_call_id
from tlt_server.frontend.parsers.pieces import Piece, SpokenCall, SpokenText


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
