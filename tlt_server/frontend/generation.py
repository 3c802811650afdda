"""One batch from admission to its last item: what every dialect calls and only phrases differently.

`Service.start` admits it; `Generation.events` yields tokens as they come and each item as it ends: exactly one `ItemResult` or one
`ItemError` per item. `close` (the client has gone, or all is said) aborts what still runs.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import NamedTuple

import structlog

from tlt_server.config import Config
from tlt_server.errors import Cancelled, EngineFailed, TltError, from_code
from tlt_server.frontend.engine_client import EngineClient
from tlt_server.frontend.sequence import Choice, Delta, Sequence
from tlt_server.frontend.text import Text
from tlt_server.frontend.validation import Batch, Validator
from tlt_server.metrics import Metrics
from tlt_server.records import StepOutput

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

    def result(self) -> ItemResult:
        return ItemResult(self.id, [self.choices[i] for i in range(len(self.sequences))], len(self.sequences[0].request.token_ids),
                          max(sequence.cached_tokens for sequence in self.sequences))


@dataclass(frozen=True)
class Service:
    """What the routes share."""

    config: Config
    engine: EngineClient
    text: Text
    validator: Validator
    metrics: Metrics
    clock: Callable[[], float] = time.monotonic

    def start(self, batch: Batch) -> Generation:
        """Admit and submit the batch, all of it or (with a typed error) nothing. The caller closes what it gets."""
        return Generation(self, batch)

    @property
    def numerics(self) -> str:
        """The mode alone, strict or fast; the engine's own words say how it is reached."""
        return self.engine.info.numerics.partition(":")[0] if self.engine.info is not None else self.config.numerics

    def rejected(self, error: TltError) -> None:
        if not isinstance(error, Cancelled):
            self.metrics.rejected.labels(error.code).inc()


class Generation:
    """A batch on its way: iterate `events` once, then `close`."""

    def __init__(self, service: Service, batch: Batch) -> None:
        self._service, self._stream = service, batch.stream
        self._owner: dict[str, tuple[_OpenItem, Sequence]] = {}
        for asked in batch.items:
            sequences = [Sequence(request, index, service.text, incremental=batch.stream, stop=self._stop)
                         for index, request in enumerate(asked.requests)]
            item = _OpenItem(asked.id, sequences)
            self._owner.update((sequence.request.id, (item, sequence)) for sequence in sequences)
        requests = [sequence.request for _, sequence in self._owner.values()]
        self._submission = service.engine.submit(requests, deadline_s=batch.deadline_s)
        self._accepted_s = service.clock()
        service.metrics.prompt.inc(sum(len(request.token_ids) for request in requests))

    async def events(self) -> AsyncGenerator[Event, None]:
        async for output in self._submission:
            item, sequence = self._owner[output.id]
            event = self._ended_badly(item, output) if output.finish_reason == "error" else None
            if event is not None:
                yield event
            if output.finish_reason == "error":
                continue
            delta = self._grown(sequence, output)
            if item.failed:
                continue
            choice = sequence.choice() if output.finish_reason is not None else None
            if self._stream and (delta.token_ids or delta.text or choice is not None):
                yield TokenEvent(item.id, delta, choice)
            if choice is not None:
                item.choices[sequence.index] = choice
                self._count(choice.finish_reason)
                if len(item.choices) == len(item.sequences):
                    yield item.result()

    def close(self) -> None:
        left = len(self._submission.open)
        self._submission.close()
        sequences = [sequence for _, sequence in self._owner.values()]
        log.info("generated", sequences=len(sequences), tokens=sum(len(s.token_ids) for s in sequences), abandoned=left,
                 seconds=round(self._service.clock() - self._accepted_s, 3))

    def _grown(self, sequence: Sequence, output: StepOutput) -> Delta:
        metrics, first = self._service.metrics, not sequence.token_ids
        delta = sequence.push(output)
        metrics.generated.inc(len(delta.token_ids))
        metrics.cached.inc(output.cached_tokens)
        if first and delta.token_ids:
            metrics.first_token_s.observe(self._service.clock() - self._accepted_s)
        return delta

    def _ended_badly(self, item: _OpenItem, output: StepOutput) -> ItemError | None:
        """The item's error, once; its other choices are of no use any more."""
        error = from_code(*(output.error or (EngineFailed.code, "the engine gave no reason")))
        self._count(error.code)
        if item.failed:
            return None
        item.failed = True
        self._service.engine.abort([s.request.id for s in item.sequences if s.request.id in self._submission.open])
        return ItemError(item.id, error)

    def _stop(self, id: str) -> None:
        self._service.engine.abort([id], finish_reason="stop")

    def _count(self, result: str) -> None:
        self._service.metrics.sequences.labels(result).inc()
        self._service.metrics.end_to_end_s.observe(self._service.clock() - self._accepted_s)
