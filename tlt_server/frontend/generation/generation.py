"""One batch from admission to its last item: what every dialect calls and only phrases differently.

`Service.start` admits it; `Generation.events` yields tokens as they come and each item as it ends:
exactly one `ItemResult` or one `ItemError` per item. `close` (the client has gone, or all is said)
aborts what still runs.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING, NamedTuple

import structlog

from tlt_server.errors import EngineFailed, Poisoned, TltError, from_code
from tlt_server.frontend.generation.choice import Choice, Delta, Sequence
from tlt_server.frontend.generation.text import Text
from tlt_server.frontend.generation.validation import Batch
from tlt_server.frontend.http.fields import shown
from tlt_server.records import GenerateRequest, StepOutput

if TYPE_CHECKING:
    from tlt_server.frontend.service import Service

log = structlog.get_logger()


class TokenEvent(NamedTuple):
    """What a choice gained. The one that ends it holds the choice, and its delta may be empty."""

    id: str
    delta: Delta
    ended: Choice | None


class ItemResult(NamedTuple):
    id: str
    choices: list[Choice]
    prompt_tokens: int
    cached_tokens: int


class ItemError(NamedTuple):
    id: str
    error: TltError


Event = TokenEvent | ItemResult | ItemError


class _OpenItem:
    """An item whose choices are not all in yet."""

    def __init__(self, id: str, sequences: list[Sequence]) -> None:
        self.id, self.sequences = id, sequences
        self.choices: dict[int, Choice] = {}
        self.failed = False

    def fail(self, error: TltError) -> list[Event]:
        """The item's error, once; its other choices are of no use any more."""
        first, self.failed = not self.failed, True
        if isinstance(error, Poisoned):
            error = Poisoned(f"item {shown(self.id)} {error.message}")
        return [ItemError(self.id, error)] if first else []

    def result(self) -> ItemResult:
        return ItemResult(
            self.id,
            [self.choices[i] for i in range(len(self.sequences))],
            len(self.sequences[0].request.token_ids),
            max(sequence.cached_tokens for sequence in self.sequences),
        )


class Items:
    """The items of a batch as they grow: outputs in, events out. The same outputs give the same
    events, live or from a journal.
    """

    def __init__(self, batch: Batch, text: Text, stop: Callable[[str], None]) -> None:
        """`stop(id)` asks the engine to end a sequence whose stop string is complete."""
        self._stream = batch.stream
        self._owner: dict[str, tuple[_OpenItem, Sequence]] = {}
        for asked in batch.items:
            sequences = [
                Sequence(request, index, text, incremental=batch.stream, stop=stop)
                for index, request in enumerate(asked.requests)
            ]
            item = _OpenItem(asked.id, sequences)
            self._owner.update((sequence.request.id, (item, sequence)) for sequence in sequences)
        self._open = set(self._owner)

    @property
    def batch(self) -> str:
        """What the ids of its sequences begin with, up to the first `-`."""
        return next(iter(self._owner), "").partition("-")[0]

    def __getitem__(self, id: str) -> Sequence:
        return self._owner[id][1]

    def __len__(self) -> int:
        return len(self._owner)

    @property
    def named(self) -> dict[str, list[str]]:
        """Item -> ids of its sequences."""
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
        """Ids of the sequences of one item."""
        return [sequence.request.id for sequence in self._owner[id][0].sequences]

    def open(self) -> list[GenerateRequest]:
        """Every sequence that has not ended, as an engine goes on with it; none of an item that has
        failed.
        """
        return [
            sequence.resumed()
            for id, (item, sequence) in self._owner.items()
            if id in self._open and not item.failed
        ]


class Generation:
    """What is open of a batch, on its way: iterate `events` once, then `close`."""

    def __init__(
        self,
        service: Service,
        items: Items,
        deadline_s: float,
        owner: str,
        keep: Callable[[list[StepOutput]], None] | None = None,
        *,
        accepted: bool = False,
    ) -> None:
        """`keep` is told outputs before anything is made of them; whoever has it can also go on
        after a crash of the engine. `accepted`: by a process before this one, so that no bound
        refuses it now.
        """
        self._service, self._items, self._keep = service, items, keep
        self._submission = service.engine.submit(
            items.open(),
            deadline_s=deadline_s,
            resume=self._resume if keep else None,
            accepted=accepted,
        )
        self._accepted_s = service.clock()
        for name, ids in items.named.items():
            service.named.open(name, ids, owner)
        self._last_token_s: dict[str, float] = {}

    async def events(self) -> AsyncGenerator[Event, None]:
        async for outputs in self._submission:
            if self._keep is not None:
                self._keep(outputs)
            for output in outputs:
                for event in self._take(output):
                    yield event

    def cached_tokens(self, id: str) -> int:
        """Prompt tokens of an item that the prefix index has served so far."""
        return self._items.cached_tokens(id)

    def close(self) -> None:
        left = len(self._submission.open)
        self._submission.close()
        for name, ids in self._items.named.items():
            self._service.named.close(name, ids)
        log.info(
            "generated",
            batch=self._items.batch,
            sequences=len(self._items),
            tokens=self._items.tokens,
            abandoned=left,
            seconds=round(self._service.clock() - self._accepted_s, 3),
        )

    def _take(self, output: StepOutput) -> list[Event]:
        sequence = self._items[output.id]
        before = len(sequence.token_ids)
        events = self._items.take(output)
        self._measure(output, sequence, before)
        if any(isinstance(event, ItemError) for event in events):
            self._service.engine.abort(
                [id for id in self._items.siblings(output.id) if id in self._submission.open]
            )
        return events

    def _measure(self, output: StepOutput, sequence: Sequence, before: int) -> None:
        """`before`: tokens that the sequence had without this output."""
        metrics, now, new = (
            self._service.metrics,
            self._service.clock(),
            len(sequence.token_ids) - before,
        )
        metrics.generated.inc(new)
        metrics.cached.inc(output.cached_tokens)
        if new:
            last, self._last_token_s[output.id] = self._last_token_s.get(output.id), now
            if last is not None:
                metrics.inter_token_s.observe((now - last) / new)
            elif not before:  # else it goes on where an engine before left it
                metrics.queued_s.observe(output.queued_s)
                metrics.first_token_s.observe(now - self._accepted_s)
        if output.finish_reason is not None:
            info = self._service.engine.info
            live = info.weight_version if info is not None else ""
            metrics.sequences.labels(
                sequence.finish_reason
                or (output.error[0] if output.error else output.finish_reason)
            ).inc()
            metrics.end_to_end_s.observe(now - self._accepted_s)
            metrics.stale.inc(
                sum(
                    span.end - span.start
                    for span in sequence.weight_versions
                    if span.version != live
                )
            )

    def _resume(self, id: str) -> GenerateRequest:
        """Called between two turns of the loop, when all that the engine before said has been taken
        in.
        """
        self._service.metrics.resumed.inc()
        return self._items[id].resumed()
