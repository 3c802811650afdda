"""One batch from admission to its last item: shared by all dialects, which only phrase it
differently.

`Generations.start` admits a batch. `Generation.events` yields tokens as they arrive and each item
as it ends: exactly one `FinishedItem` or one `FailedItem` per item. Outputs that arrive while the
caller or the loop is busy become one event per choice. `close`, when the client has left or has
everything, aborts the rest.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from operator import attrgetter

import structlog

from tlt_server.frontend.generation.choice import GrowingChoice
from tlt_server.frontend.generation.items import Event, FailedItem, FinishedItem, Items, TokenEvent
from tlt_server.frontend.generation.requests import RequestBatch
from tlt_server.frontend.generation.text import Text
from tlt_server.frontend.http.access import CURRENT
from tlt_server.frontend.http.keys import Caller
from tlt_server.frontend.http.slices import FREED, SLICE_BYTES, LoopShare
from tlt_server.frontend.link.client import EngineClient
from tlt_server.metrics import Metrics
from tlt_server.wire.records import StepOutput, adapted_version

log = structlog.get_logger()
Keep = Callable[[list[StepOutput]], None]
OUTPUT_BYTES = 512  # cost of an output without its tokens
SHED_TOKENS = 512  # freed at once
VALUE_BYTES = 16  # about the JSON of one number: the id or log-prob of a token or alternative


def repeated(names: Iterable[str]) -> str | None:
    """Return the first name that is repeated, or None."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


class Named:
    """Open sequences by name. A name that is used twice means all sequences with it."""

    def __init__(self) -> None:
        self._owners: dict[str, dict[str, str]] = {}  # name -> sequence -> name of the key

    def open(self, name: str, ids: Iterable[str], owner: str) -> None:
        self._owners.setdefault(name, {}).update(dict.fromkeys(ids, owner))

    def close(self, name: str, ids: Iterable[str]) -> None:
        left = self._owners.get(name, {})
        for id in ids:
            left.pop(id, None)
        if not left:
            self._owners.pop(name, None)

    def find(self, names: Iterable[str], caller: Caller) -> list[str]:
        """Return the ids, each once, of all sequences with these names that the caller may end.
        Unknown names are treated as finished.
        """
        return [
            *dict.fromkeys(
                id
                for name in names
                for id, owner in self._owners.get(name, {}).items()
                if caller.sees(owner)
            )
        ]

    def __len__(self) -> int:
        return len(self._owners)


@dataclass(frozen=True)
class Generations:
    """Makes the items of batches and hands them to the engine."""

    engine: EngineClient
    text: Text
    metrics: Metrics
    clock: Callable[[], float] = time.monotonic
    named: Named = field(default_factory=Named)  # what is open, by the items' ids
    share: LoopShare = field(default_factory=LoopShare)

    def items(self, batch: RequestBatch) -> Items:
        """Return the batch's items, before any generation."""
        return Items(batch, self.text, lambda id: self.engine.abort([id], finish_reason="stop"))

    async def start(
        self, batch: RequestBatch, owner: str, names: Collection[str] = ()
    ) -> Generation:
        """Admit and submit the batch, all of it or (with a typed error) nothing. The caller closes
        the generation. `owner`: name of the API key. `names`: further names of the whole batch.
        """
        items = self.items(batch)
        await asyncio.sleep(0)  # other requests run, since both halves of a large batch take long
        generation = self.submit(items, batch.deadline_s, owner)
        generation.call(names)
        self.metrics.sequences.prompt.inc(
            sum(len(request.token_ids) for item in batch.items for request in item.requests)
        )
        for item in batch.items:
            if lora := item.requests[0].lora:
                self.metrics.weights.asked(lora, len(item.requests))
        return generation

    def submit(
        self,
        items: Items,
        deadline_s: float,
        owner: str,
        keep: Keep | None = None,
        *,
        accepted: bool = False,
    ) -> Generation:
        """Submit the unfinished sequences of these items. With `keep`, which gets the outputs
        before they become events, the generation continues after a crash of the engine. `accepted`:
        an earlier process has admitted them, so no bound applies now.
        """
        return Generation(self, items, deadline_s, owner, keep, accepted=accepted)


class Generation:
    """The open items of one batch: iterate `events` once, then `close`."""

    def __init__(
        self,
        shared: Generations,
        items: Items,
        deadline_s: float,
        owner: str,
        keep: Keep | None,
        *,
        accepted: bool,
    ) -> None:
        self._engine, self._named = shared.engine, shared.named
        self._items, self._keep = items, keep
        self.turn = shared.share.of(owner)  # await it before a slice of work for the reply
        self._measured = _Measured(shared)
        self._submission = self._engine.submit(
            items.open(), deadline_s=deadline_s, resumes=keep is not None, accepted=accepted
        )
        self._owner = owner
        self._names = items.named
        for name, ids in self._names.items():
            self._named.open(name, ids, owner)

    def call(self, names: Iterable[str]) -> None:
        """Add names by which all sequences can be found."""
        ids = [*chain.from_iterable(self._items.named.values())]
        for name in names:
            self._names[name] = ids
            self._named.open(name, ids, self._owner)

    async def events(self) -> AsyncGenerator[Event, None]:
        async for few, size in self._submission.slices(self._size, SLICE_BYTES):
            await self.turn(size)
            if self._keep is not None:
                self._keep(few)
            for id, successive in groupby(few, attrgetter("id")):
                outputs = [*successive]
                if outputs[-1].finish_reason is not None:  # its whole text may be decoded
                    tokens = sum(len(output.token_ids) for output in outputs)
                    tokens += len(self._items[id].token_ids)
                    await self.turn(VALUE_BYTES * tokens)
                for event in self._take(id, outputs):
                    yield event

    async def successes(self) -> AsyncGenerator[TokenEvent | FinishedItem, None]:
        """Yield events for a reply that must be complete: the first item that fails raises its
        error.
        """
        async for event in self.events():
            if isinstance(event, FailedItem):
                raise event.error
            yield event

    def cached_tokens(self, id: str) -> int:
        """Return the number of an item's prompt tokens that the prefix index has served so far."""
        return self._items.cached_tokens(id)

    def close(self) -> None:
        left = len(self._submission.open)
        self._submission.close()
        for name, ids in self._names.items():
            self._named.close(name, ids)
        log.info(
            "generated",
            batch=self._items.batch,
            sequences=len(self._items),
            tokens=self._items.tokens,
            abandoned=left,
            seconds=round(self._measured.age_s, 3),
        )

    async def release(self) -> None:
        """Free the results after their reply is sent. Freeing 50,000 tokens with alternatives at
        once would hold the loop for 30 ms.
        """
        for choice in self._items.growing:
            while choice.shed(SHED_TOKENS):
                await self.turn(SLICE_BYTES)
        await self.release_items()

    async def release_items(self) -> None:
        """Free the items, except for their results."""
        while self._items.shed(FREED):
            await self.turn(SLICE_BYTES)

    def _size(self, output: StepOutput) -> int:
        """Return the bytes of JSON that take as long to encode as this output."""
        best = output.top_logprobs[0].token_ids if output.top_logprobs else ()
        values = len(output.token_ids) * (2 + 2 * len(best)) + len(output.prompt_logprobs or ())
        return OUTPUT_BYTES + VALUE_BYTES * values

    def _take(self, id: str, outputs: Sequence[StepOutput]) -> list[Event]:
        sequence = self._items[id]
        before = len(sequence.token_ids)
        events = self._items.take(outputs)
        with self._engine.faults.containing("the figures of a sequence"):
            self._measured.take(outputs, sequence, before)
        if any(isinstance(event, FailedItem) for event in events):
            self._engine.abort(
                [other for other in self._items.siblings(id) if other in self._submission.open]
            )
        return events


class _Measured:
    """The metrics of one generation."""

    def __init__(self, shared: Generations) -> None:
        self._metrics, self._clock, self._engine = (
            shared.metrics.sequences,
            shared.clock,
            shared.engine,
        )
        self._accepted_s, self._trace = self._clock(), CURRENT.get()
        self._begun_s: dict[str, tuple[float, float]] = {}  # when started, and its first token

    @property
    def age_s(self) -> float:
        return self._clock() - self._accepted_s

    def take(self, outputs: Sequence[StepOutput], sequence: GrowingChoice, before: int) -> None:
        """Count outputs of a sequence. `before`: tokens that it had without them."""
        metrics, now, new = self._metrics, self._clock(), len(sequence.token_ids) - before
        first, last = outputs[0], outputs[-1]
        metrics.generated.inc(new)
        if first.cached_tokens:
            metrics.cached.inc(first.cached_tokens)
        if new and not before:  # else it continues what an earlier engine began
            self._begun_s[last.id] = min(self._accepted_s + first.queued_s, now), now
        if last.finish_reason is not None:
            error = last.error[0] if last.error else last.finish_reason
            reason = sequence.finish_reason or error
            metrics.ended.labels(reason).inc()
            self._record(sequence, self._begun_s.pop(last.id, None), now, reason)
            metrics.end_to_end_s.observe(now - self._accepted_s)
            metrics.stale.inc(self._stale_tokens(sequence))

    def _record(
        self, sequence: GrowingChoice, begun_s: tuple[float, float] | None, now: float, reason: str
    ) -> None:
        """Record the parts of a sequence: queue, prefill up to its first token, decode."""
        started_s, first_s = begun_s or (now, now)
        self._trace.part("queue", self._accepted_s, started_s)
        if begun_s is None:
            return
        self._trace.part(
            "prefill",
            started_s,
            first_s,
            gen_ai__usage__input_tokens=len(sequence.request.token_ids),
            tlt__cached_tokens=sequence.cached_tokens,
        )
        self._trace.part(
            "decode",
            first_s,
            now,
            gen_ai__usage__output_tokens=len(sequence.token_ids),
            tlt__finish_reason=reason,
        )

    def _stale_tokens(self, sequence: GrowingChoice) -> int:
        """Return how many tokens were computed by another version than the live one."""
        info = self._engine.info
        live, lora = info.weight_version if info is not None else "", sequence.request.lora
        if info is not None and lora:
            live = adapted_version(live, lora, info.adapters.get(lora, ""))
        return sum(
            span.end - span.start for span in sequence.weight_versions if span.version != live
        )
