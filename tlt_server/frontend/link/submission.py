"""The sequences of one request: `sequences` puts their outputs in, a generation takes them out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence

from msgspec import Struct

from tlt_server.records import GenerateRequest, StepOutput

Resume = Callable[[str], GenerateRequest]  # id -> the rest of that sequence


class Submission:
    """Iterate for the outputs that have come since, in order of arrival, until each sequence has
    ended.
    """

    def __init__(
        self, ids: Sequence[str], close: Callable[[Submission], None], resume: Resume | None = None
    ) -> None:
        self.open = set(ids)
        self.resume = resume
        self._outputs: asyncio.Queue[StepOutput] = asyncio.Queue()
        self._close = close
        self._timer: asyncio.TimerHandle | None = None

    def put(self, output: StepOutput) -> None:
        if output.id in self.open:
            if output.finish_reason is not None:
                self.open.discard(output.id)
                if not self.open and self._timer is not None:
                    self._timer.cancel()
            self._outputs.put_nowait(output)

    def expire_at(self, when: float, expire: Callable[[], None]) -> None:
        self._timer = asyncio.get_running_loop().call_later(
            max(0.0, when - time.monotonic()), expire
        )

    async def __aiter__(self) -> AsyncIterator[list[StepOutput]]:
        while self.open or not self._outputs.empty():
            outputs = [await self._outputs.get()]
            while not self._outputs.empty():
                outputs.append(self._outputs.get_nowait())
            yield outputs

    def close(self) -> None:
        """Abort what has not ended; the engine's answers to that are dropped."""
        if self._timer is not None:
            self._timer.cancel()
        self._close(self)


class Route(Struct, gc=False):
    """The way of a sequence's outputs to its submission."""

    submission: Submission
    request: GenerateRequest
    tokens: int = 0  # tokens given so far
    held: bool = False  # the sequence waits here, and the engine does not know it
    ending: str = ""  # the finish reason that an abort asked for
