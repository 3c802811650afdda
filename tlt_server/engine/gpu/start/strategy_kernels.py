"""Prepares the kernels and graphs of a policy's strategies while another policy is active.

Between two steps a rehearsal lists the kernels that are not loaded. Other processes compile them
while steps continue, then they are loaded, again between steps. All ranks list and load in parts of
the same size, and the next part waits for all ranks. Finally graphs are captured, one between two
steps, unless the policy itself waits for graphs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from threading import Thread
from typing import Protocol

from tlt_kernels.gpu.variants import Variant, loaded
from tlt_server.engine.gpu.memory.graphs import GraphPool
from tlt_server.engine.gpu.orders import DropKernels, ListKernels, LoadKernels
from tlt_server.engine.gpu.passes import Passes, Rehearsed
from tlt_server.engine.gpu.start.compiling import Compiled
from tlt_server.engine.gpu.start.preparing import KernelList, Key, Keys, rehearsals
from tlt_server.engine.gpu.steps.buckets import Shapes
from tlt_server.engine.gpu.steps.drafts import DraftKey
from tlt_server.engine.gpu.steps.extend import ExtendKey, unrecorded
from tlt_server.engine.ranks.orders import RankOrders
from tlt_server.errors import Unavailable
from tlt_server.speculation.sizes import Reach
from tlt_server.wire.records import Strategy

PART_S = 0.005  # time that a part between two steps takes; one pass or kernel may take longer


class Preparing(Protocol):
    """The runner of rank 0."""

    passes: Passes
    shapes: Shapes
    graphs: GraphPool
    ranks: RankOrders

    def record(self, key: Key) -> None: ...


class KernelCompiler(Protocol):
    """Processes that compile; see `ParallelCompiler`."""

    def end(self, on_progress: Callable[[int, int], None]) -> Compiled: ...

    def stop(self) -> None: ...


class Kernels(Protocol):
    """The kernels that a start has compiled; see `KernelStart`."""

    def compiler(self, variants: Sequence[Variant]) -> KernelCompiler: ...

    def remember(self, found: Mapping[Variant, str]) -> None: ...


class StrategyKernels:
    """The passes whose kernels are loaded. A call returns the preparation of a policy's missing
    kernels and graphs; None if nothing is missing.
    """

    def __init__(self, runner: Preparing, kernels: Kernels, at_start: Keys) -> None:
        self.runner, self.kernels = runner, kernels
        self._ready: set[tuple[DraftKey | None, ExtendKey | None]] = set()
        self.prepared(rehearsals(at_start))

    def __call__(self, reach: Reach) -> KernelPreparation | None:
        shapes, graphs, keys = self.runner.shapes, self.runner.graphs, Keys()
        lacking = [*self._lacking(rehearsals(shapes.captured(reach)))]
        if graphs.captures and not self.runner.passes.run_first:
            reached = shapes.captured(partial(decided, reach))
            keys = [key for key in reached if unrecorded(key, graphs)]
        return KernelPreparation(self, lacking, keys) if lacking or keys else None

    def prepared(self, passes: Iterable[Rehearsed]) -> None:
        for draft, extends in passes:
            self._ready |= {(draft, key) for key in (None, *extends)}

    def _lacking(self, passes: Iterable[Rehearsed]) -> Iterable[Rehearsed]:
        for draft, extends in passes:
            left = tuple(key for key in extends if (draft, key) not in self._ready)
            if left or (draft, None) not in self._ready:
                yield Rehearsed(draft, left)


def decided(reach: Reach, requests: range, *, prompts: bool) -> Iterator[Strategy]:
    """Yield the strategies of a policy for each number of requests at which it has at most one
    choice. A policy with more choices may pick those with graphs.
    """
    for count in requests:
        found = set[Strategy]()
        for strategy in reach(range(count, count + 1), prompts=prompts):
            found |= {strategy} if strategy.drafter else set()
            if len(found) > 1:
                break
        else:
            yield from found


class KernelPreparation:
    """The kernels and graphs of one policy, from the list to the last capture."""

    def __init__(
        self,
        strategies: StrategyKernels,
        lacking: list[Rehearsed],
        keys: Keys,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._strategies, self._lacking, self._clock = strategies, lacking, clock
        self._kernels, self._rehearsed = KernelList(strategies.runner.passes), 0
        self._compiling: _Compiling | None = None
        self._all_told = not lacking  # the others know of the last part
        self._keys, self._recorded = keys[::-1], 0  # those to record, the next one last
        self._hashes: dict[Variant, str] = {}

    @property
    def stage(self) -> str:
        """Describe the current stage."""
        of, found = len(self._lacking), len(self._kernels.found)
        if self._rehearsed < of:
            return f"{self._rehearsed} of {of} passes are rehearsed"
        if self._all_told:
            return f"{self._recorded} graphs are recorded, and {len(self._keys)} are left"
        if self._compiling is None or self._compiling.ended:
            return f"{found} kernels are being loaded"
        return f"{self._compiling.done} of {found} kernels are compiled"

    @property
    def taken(self) -> str:
        ended = self._compiling.ended if self._compiling else None
        new = ended.new if ended else 0
        loaded = f"{new} kernels were compiled for it, {len(self._kernels.found)} loaded"
        return f"{loaded}, and {self._recorded} graphs recorded"

    def advance(self) -> bool:
        """Do one part between two steps and return whether all is done. Raises `Unavailable` if a
        kernel cannot be compiled or the GPU lacks the memory.
        """
        runner = self._strategies.runner
        if not runner.graphs.quiet:  # loading may wait for all that the GPU does
            return False
        ranks, until_s = runner.ranks, self._clock() + PART_S
        if not (
            ranks.done()
            and self._list(ranks, until_s)
            and self._is_compiled()
            and self._load(ranks, until_s)
            and self._record()
        ):
            return False
        self._strategies.prepared(self._lacking)
        self._strategies.kernels.remember(self._hashes)
        return True

    def _list(self, ranks: RankOrders, until_s: float) -> bool:
        while self._rehearsed < len(self._lacking):
            if self._clock() >= until_s:
                return False
            passes = self._lacking[self._rehearsed]
            self._rehearsed += 1
            ranks.begin(ListKernels(passes, self._rehearsed == 1))
            self._kernels.add(passes)
        return True

    def _is_compiled(self) -> bool:
        found = self._kernels.found
        if not found:
            return True
        if self._compiling is None:
            self._compiling = _Compiling(self._strategies.kernels.compiler([*found]))
        ended = self._compiling.ended
        if ended is not None and ended.why:
            raise Unavailable(
                f"{len(found) - ended.done} of {len(found)} kernels of this policy are not "
                f"compiled ({ended.why}); set it again once that is mended"
            )
        return ended is not None

    def _load(self, ranks: RankOrders, until_s: float) -> bool:
        if not self._all_told:
            kernels, before = self._kernels, self._kernels.left
            with loaded() as hashes:
                while kernels.left and self._clock() < until_s:
                    kernels.load(1, last=False)
            self._hashes |= hashes
            self._all_told = not kernels.left
            ranks.begin(LoadKernels(before - kernels.left, self._all_told))
        return self._all_told and ranks.done()

    def _record(self) -> bool:
        """Capture the next graph, while there is memory for it."""
        runner = self._strategies.runner
        while self._keys and runner.graphs.spare:
            key = self._keys.pop()
            if unrecorded(key, runner.graphs):
                runner.record(key)
                self._recorded += 1
                return False
        return True

    def stop(self) -> None:
        """Give up and free the buffers of the rehearsals."""
        if self._compiling is not None:
            self._compiling.compiler.stop()
        if self._rehearsed:
            ranks = self._strategies.runner.ranks
            with suppress(Unavailable):
                ranks.finish()  # they are a part late at most
            ranks.order(DropKernels())
            self._kernels.drop()


class _Compiling:
    """A compiler and the thread that waits for it."""

    def __init__(self, compiler: KernelCompiler) -> None:
        self.compiler, self.done = compiler, 0
        self.ended: Compiled | None = None
        Thread(target=self._wait, daemon=True).start()

    def _wait(self) -> None:
        ended = Compiled(0, "the compiler's reports cannot be read")
        try:
            ended = self.compiler.end(self._progressed)
        finally:
            self.ended = ended

    def _progressed(self, done: int, of: int) -> None:
        self.done = done
