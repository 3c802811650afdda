"""The items of a batch as they grow: outputs of the engine in, events out.

An item ends in exactly one `FinishedItem` or one `FailedItem`. Nothing here waits: the same outputs
give the same events, whether they come from the engine or from a journal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tlt_server.errors import EngineFailed, Poisoned, TltError, from_code
from tlt_server.frontend.generation.batch import RequestBatch
from tlt_server.frontend.generation.choice import Delta, FinishedChoice, GrowingChoice
from tlt_server.frontend.generation.text import Text
from tlt_server.frontend.http.fields import shown
from tlt_server.records import GenerateRequest, StepOutput


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


class _OpenItem:
    """An item whose choices are not all in yet."""

    def __init__(self, id: str, sequences: list[GrowingChoice]) -> None:
        self.id, self.sequences = id, sequences
        self.choices: dict[int, FinishedChoice] = {}
        self.failed = False

    def fail(self, error: TltError) -> list[Event]:
        """Return the item's error, but only once; its other choices are dropped."""
        first, self.failed = not self.failed, True
        if isinstance(error, Poisoned):
            error = Poisoned(f"item {shown(self.id)} {error.message}")
        return [FailedItem(self.id, error)] if first else []

    def result(self) -> FinishedItem:
        return FinishedItem(
            self.id,
            [self.choices[i] for i in range(len(self.sequences))],
            len(self.sequences[0].request.token_ids),
            max(sequence.cached_tokens for sequence in self.sequences),
        )


class Items:
    def __init__(self, batch: RequestBatch, text: Text, stop: Callable[[str], None]) -> None:
        """`stop(id)` asks the engine to end a sequence whose stop string is complete."""
        self._stream = batch.stream
        self._owner: dict[str, tuple[_OpenItem, GrowingChoice]] = {}
        for asked in batch.items:
            sequences = [
                GrowingChoice(request, index, text, incremental=batch.stream, stop=stop)
                for index, request in enumerate(asked.requests)
            ]
            item = _OpenItem(asked.id, sequences)
            self._owner.update((sequence.request.id, (item, sequence)) for sequence in sequences)
        self._open = set(self._owner)

    @property
    def batch(self) -> str:
        """The common start of the ids of its sequences, up to the first `-`."""
        return next(iter(self._owner), "").partition("-")[0]

    def __getitem__(self, id: str) -> GrowingChoice:
        return self._owner[id][1]

    def __len__(self) -> int:
        return len(self._owner)

    @property
    def named(self) -> dict[str, list[str]]:
        """Ids of the sequences of each item."""
        names: dict[str, list[str]] = {}
        for id, (item, _) in self._owner.items():
            names.setdefault(item.id, []).append(id)
        return names

    def cached_tokens(self, item: str) -> int:
        return max(self._owner[id][1].cached_tokens for id in self.named[item])

    @property
    def tokens(self) -> int:
        return sum(len(sequence.token_ids) for _, sequence in self._owner.values())

    def take(self, output: StepOutput) -> list[Event]:
        item, sequence = self._owner[output.id]
        if output.finish_reason is not None:
            self._open.discard(output.id)
        if output.finish_reason == "error":
            return item.fail(
                from_code(*(output.error or (EngineFailed.code, "the engine gave no reason")))
            )
        delta = sequence.push(output)
        if item.failed:
            return []
        events: list[Event] = []
        choice = sequence.choice() if output.finish_reason is not None else None
        if self._stream and (delta.token_ids or delta.text or choice is not None):
            events.append(TokenEvent(item.id, delta, choice))
        if choice is not None:
            item.choices[sequence.index] = choice
            if len(item.choices) == len(item.sequences):
                events.append(item.result())
        return events

    def siblings(self, id: str) -> list[str]:
        """Return the ids of all sequences of the item that this one belongs to."""
        return [sequence.request.id for sequence in self._owner[id][0].sequences]

    def open(self) -> list[GenerateRequest]:
        """Return a request that continues each sequence that has not ended; none of an item that
        has failed.
        """
        return [
            sequence.resumed()
            for id, (item, sequence) in self._owner.items()
            if id in self._open and not item.failed
        ]
