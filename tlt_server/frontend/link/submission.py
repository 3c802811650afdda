"""The sequences of one request: `sequences` adds their outputs, a generation reads them."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence

import msgspec
from msgspec import Struct

from tlt_server.wire.records import GenerateRequest, StepOutput


class Submission:
    """The outputs that were not read yet, by sequence."""

    def __init__(
        self, ids: Sequence[str], close: Callable[[Submission], None], *, resumes: bool = False
    ) -> None:
        """`resumes`: the sequences continue after a death of the engine."""
        self.open = set(ids)
        self.resumes = resumes
        self._outputs: OrderedDict[str, list[StepOutput]] = OrderedDict()
        self._some = asyncio.Event()
        self._close = close
        self._timer: asyncio.TimerHandle | None = None

    def put(self, output: StepOutput) -> None:
        if output.id not in self.open:
            return
        if output.finish_reason is not None:
            self.open.discard(output.id)
            if not self.open and self._timer is not None:
                self._timer.cancel()
        self._outputs.setdefault(output.id, []).append(output)
        self._some.set()

    def expire_at(self, when: float, expire: Callable[[], None]) -> None:
        self._timer = asyncio.get_running_loop().call_later(
            max(0.0, when - time.monotonic()), expire
        )

    async def slices(
        self, size_of: Callable[[StepOutput], int], limit: int
    ) -> AsyncIterator[tuple[list[StepOutput], int]]:
        """Yield the new outputs in slices that end when their size reaches `limit`, each with its
        size, until every sequence has ended. The outputs of a sequence keep their order and stay
        together, so that each chunk of a stream has as many tokens as possible.
        """
        while self.open or self._outputs:
            await self._some.wait()
            self._some.clear()
            arrived, self._outputs = self._outputs, OrderedDict()
            few: list[StepOutput] = []
            size = 0
            while arrived:
                _, outputs = arrived.popitem(last=False)
                for output in outputs:
                    few.append(output)
                    size += size_of(output)
                    if size >= limit:
                        yield few, size
                        few, size = [], 0
            if few:
                yield few, size

    def close(self) -> None:
        """Abort the sequences that have not ended; the engine's answers to that are dropped."""
        if self._timer is not None:
            self._timer.cancel()
        self._close(self)


class Route(Struct, gc=False):
    """Routes a sequence's outputs to its submission."""

    submission: Submission
    request: GenerateRequest
    accepted_s: float = 0.0  # time.monotonic()
    last_s: float = 0.0  # likewise, of the last output with tokens; 0: there was none
    tokens: int = 0  # tokens given so far
    stepped: bool = False  # the engine that has it now gave some of them
    generated: list[int] = []  # these tokens, of a sequence that can resume; not the request's own
    held: bool = False  # the sequence waits here, and the engine does not know it
    ending: str = ""  # the finish reason that an abort asked for

    @property
    def is_open(self) -> bool:
        """Return False once the client has left."""
        return self.request.id in self.submission.open

    def take(self, output: StepOutput) -> None:
        """Count an output."""
        self.tokens += len(output.token_ids)
        self.stepped |= bool(output.token_ids)
        if self.submission.resumes:
            self.generated += output.token_ids

    def rest(self) -> GenerateRequest:
        """Return the request by which an engine starts or continues the sequence."""
        if not self.generated:
            return self.request
        generated = [*self.request.generated, *self.generated]
        return msgspec.structs.replace(self.request, generated=generated, begin_by_s=None)
