"""The items of a batch during their generation: outputs of the engine in, events out.

An item ends in exactly one `FinishedItem` or one `FailedItem`. Nothing here waits: the same outputs
give the same events, whether they come from the engine or from a journal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from tlt_server.errors import Conflict, EngineFailed, Poisoned, TltError, from_code
from tlt_server.frontend.generation.choice import Delta, FinishedChoice, GrowingChoice
from tlt_server.frontend.generation.requests import ItemFields, RequestBatch, RequestItem
from tlt_server.frontend.generation.text import Text
from tlt_server.frontend.http.fields import shown
from tlt_server.wire.events import EngineInfo
from tlt_server.wire.labels import label_of
from tlt_server.wire.records import GenerateRequest, StepOutput, adapted_version


class TokenEvent(NamedTuple):
    """New tokens of a choice. The last event has the finished choice; its delta may be empty."""

    id: str
    delta: Delta
    ended: FinishedChoice | None


class FinishedItem(NamedTuple):
    id: str
    choices: list[FinishedChoice]
    prompt_tokens: int
    cached_tokens: int


class FailedItem(NamedTuple):
    id: str
    error: TltError


Event = TokenEvent | FinishedItem | FailedItem
Begin = Callable[[GenerateRequest, int], GrowingChoice]


class _OpenItem:
    """An item with unfinished choices."""

    def __init__(self, asked: RequestItem, begin: Begin) -> None:
        self.id, self.requests, self._begin = asked.id, asked.requests, begin
        self.growing: dict[int, GrowingChoice] = {}  # made when it is first asked for
        self.choices: dict[int, FinishedChoice] = {}
        self.failed = False

    def sequence(self, index: int) -> GrowingChoice:
        if index not in self.growing:
            self.growing[index] = self._begin(self.requests[index], index)
        return self.growing[index]

    def rest(self, index: int) -> GenerateRequest:
        """Return the request that continues a choice."""
        growing = self.growing.get(index)
        return growing.resumed() if growing is not None else self.requests[index]

    @property
    def cached_tokens(self) -> int:
        return max((choice.cached_tokens for choice in self.growing.values()), default=0)

    def fail(self, error: TltError) -> list[Event]:
        """Return the item's error, once only; its other choices are dropped."""
        first, self.failed = not self.failed, True
        if isinstance(error, Poisoned):
            error = Poisoned(f"item {shown(self.id)} {error.message}")
        return [FailedItem(self.id, error)] if first else []

    def result(self) -> FinishedItem:
        return FinishedItem(
            self.id,
            [self.choices[i] for i in range(len(self.requests))],
            len(self.requests[0].token_ids),
            self.cached_tokens,
        )


def pinned(field: str, item: ItemFields, info: EngineInfo) -> str:
    """Return the version that must compute this item's tokens; empty: any. `Conflict` if it is not
    live. `field`: the path before the field's name.
    """
    live, wanted = info.weight_version, item.weight_version
    if wanted not in ("", live, label_of(live)):
        raise Conflict(
            f"{field}weight_version is {shown(wanted)}, and {shown(live)} is live; push that "
            "version first, or leave the field out"
        )
    if not wanted or not item.lora:
        return wanted and live
    return adapted_version(live, item.lora, info.adapters[item.lora])


class Items:
    def __init__(self, batch: RequestBatch, text: Text, stop: Callable[[str], object]) -> None:
        """`stop(id)`: asks the engine to end a sequence whose stop string is complete."""
        self._stream = batch.stream

        def begin(request: GenerateRequest, index: int) -> GrowingChoice:
            return GrowingChoice(request, index, text, incremental=batch.stream, stop=stop)

        self._items = [_OpenItem(asked, begin) for asked in batch.items]
        self._by_name = {item.id: item for item in self._items}
        self._owner = {  # id of a sequence -> its item, and which of its choices it is
            request.id: (item, index)
            for item in self._items
            for index, request in enumerate(item.requests)
        }
        self._open = set(self._owner)

    @property
    def batch(self) -> str:
        """The common prefix of its sequences' ids, up to the first `-`."""
        return next(iter(self._owner), "").partition("-")[0]

    def __getitem__(self, id: str) -> GrowingChoice:
        item, index = self._owner[id]
        return item.sequence(index)

    def __len__(self) -> int:
        return len(self._owner)

    @property
    def named(self) -> dict[str, list[str]]:
        """Ids of the sequences of each item."""
        return {item.id: [request.id for request in item.requests] for item in self._items}

    def cached_tokens(self, item: str) -> int:
        return self._by_name[item].cached_tokens

    @property
    def tokens(self) -> int:
        return sum(
            len(choice.token_ids) for item in self._items for choice in item.growing.values()
        )

    def take(self, outputs: Sequence[StepOutput]) -> list[Event]:
        """Add successive outputs of a sequence."""
        last = outputs[-1]
        item, index = self._owner[last.id]
        wanted = item.requests[index].weight_version
        others = {o.weight_version for o in outputs if o.token_ids} - {wanted} if wanted else None
        if last.finish_reason is not None:
            self._open.discard(last.id)
        if others:
            return item.fail(
                Conflict(
                    f"item {shown(item.id)} asks for weight_version {shown(wanted)}, and "
                    f"{shown(others.pop())} was pushed before its end; send it again without one"
                )
            )
        if last.finish_reason != "error":
            return self._grow(item, index, outputs)
        error = from_code(*(last.error or (EngineFailed.code, "the engine gave no reason")))
        before = [*outputs[:-1], msgspec.structs.replace(last, finish_reason=None)]
        return [*self._grow(item, index, before), *item.fail(error)]

    def _grow(self, item: _OpenItem, index: int, outputs: Sequence[StepOutput]) -> list[Event]:
        sequence = item.sequence(index)
        delta = sequence.push(outputs)
        if item.failed:
            return []
        events: list[Event] = []
        choice = sequence.choice() if sequence.finish_reason is not None else None
        if self._stream and (delta.token_ids or delta.text or choice is not None):
            events.append(TokenEvent(item.id, delta, choice))
        if choice is not None:
            item.choices[index] = choice
            if len(item.choices) == len(item.requests):
                events.append(item.result())
        return events

    def shed(self, sequences: int) -> bool:
        """Free items with about this number of sequences; holders of their results keep them.
        Return True if there are more.
        """
        while self._items and sequences > 0:
            item = self._items.pop()
            sequences -= len(item.requests)
            del self._by_name[item.id]
            for request in item.requests:
                del self._owner[request.id]
        return bool(self._items)

    @property
    def growing(self) -> list[GrowingChoice]:
        """Return the choices that have had an output."""
        return [choice for item in self._items for choice in item.growing.values()]

    def siblings(self, id: str) -> list[str]:
        """Return the ids of all sequences of the item that this one belongs to."""
        return [request.id for request in self._owner[id][0].requests]

    def open(self) -> list[GenerateRequest]:
        """Return a request that continues each unfinished sequence; none of a failed item. It is
        patient if only the last output leads to an event or a stop.
        """
        rests = [
            item.rest(index)
            for id, (item, index) in self._owner.items()
            if id in self._open and not item.failed
        ]
        return [
            msgspec.structs.replace(rest, patient=not (self._stream or rest.sampling.stop))
            for rest in rests
        ]
