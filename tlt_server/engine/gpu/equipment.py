"""The runner with everything that pushes swap, sleeps free and idle time captures, on this rank and
on the others.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tlt_server.engine.devices import Equipment
from tlt_server.engine.gpu.orders import SetDrafterTable, Settle, SwapModels
from tlt_server.engine.gpu.runner import GpuRunner
from tlt_server.engine.gpu.start.maker import Lent
from tlt_server.engine.gpu.start.recordings import GraphRecordings
from tlt_server.engine.gpu.start.strategy_kernels import StrategyKernels
from tlt_server.engine.gpu.steps.drafts import DraftKey
from tlt_server.engine.gpu.steps.extend import ExtendKey, unrecorded
from tlt_server.engine.policy_changes import Preparation
from tlt_server.engine.ranks.orders import FreePages
from tlt_server.engine.ranks.ranks import reclaim_on
from tlt_server.engine.ranks.shared_models import key_of
from tlt_server.engine.schedule.sequence import Sequence
from tlt_server.models.gpu.decoder import GpuDecoder
from tlt_server.models.gpu.swapping import swap_networks
from tlt_server.speculation.calibration import Calibration
from tlt_server.speculation.sizes import Reach
from tlt_server.weights.parts import Changed, Drafter, Live


class GpuEquipment(Equipment):
    runner: GpuRunner

    def __init__(
        self,
        runner: GpuRunner,
        lent: Lent,
        synchronize: Callable[[], None],
        idle: IdleRecorder,
        kernels: StrategyKernels | None,
        detail: str,
        matmuls: str,
    ) -> None:
        """`kernels`: those of strategies, if they are compiled ahead."""
        self.runner, self.ranks, self.tables = runner, runner.ranks, runner.tables
        self.detail, self.matmuls, self._lent = detail, matmuls, lent
        self._synchronize, self._idle, self._kernels = synchronize, idle, kernels

    def forget(self) -> None:
        self.runner.forget()

    def on_end(self, sequence: Sequence) -> None:
        self.runner.texts.end(sequence)

    def room(self, decoding: int, max_rows: int) -> int:
        return self.runner.shapes.room(decoding, max_rows)

    def record(self, reach: Reach) -> bool:
        return self._idle(reach)

    def prepare(self, reach: Reach) -> Preparation | None:
        return self._kernels(reach) if self._kernels else None

    def prepared(self, reach: Reach) -> str:
        return self._idle.prepared(reach)

    def install(self, live: Live, changed: Changed) -> None:
        self._synchronize()  # staging copied on another stream
        with torch.cuda.stream(self.runner.stream):
            self._exchange(live, changed)
        self._synchronize()  # before another stream fills what the old version gives back
        self.ranks.order(Settle(), wait=True)

    def _exchange(self, live: Live, changed: Changed) -> None:
        state = self.runner.state
        if changed.target is not None:
            assert isinstance(changed.target.network, GpuDecoder)
            self._swap(state.model, changed.target.network)
            swap_networks(state.model, changed.target.network)
            state.model = changed.target.network
        if changed.drafter is not None:
            self._install_drafter(changed.drafter)
        if changed.adapter is not None:
            assert state.adapters is not None
            adapter = live.adapters[changed.adapter.name]
            state.adapters.fill(adapter.slot, adapter.network)

    def _install_drafter(self, changed: Drafter) -> None:
        for drafts in self.runner.passes.drafters.values():
            if drafts.network is not None:
                self._swap(drafts.network, changed.network)
                assert isinstance(changed.calibration, Calibration)
                table = changed.calibration
                edges, acceptance = table.gap_edges, table.acceptance_K
                self.ranks.order(SetDrafterTable(edges.view("<i4"), acceptance.view("<i4")))
            drafts.install(changed)

    def _swap(self, resident: object, other: object) -> None:
        """Swap two models, named by their storage, on this rank and on the others."""
        if resident is not other:
            self.ranks.order(SwapModels(key_of(resident), key_of(other)))

    def free(self) -> None:
        self.ranks.order(FreePages(), wait=True)
        self._lent.free()

    def reclaim(self) -> None:
        self._lent.reclaim()
        reclaim_on(self.ranks, self._lent.free)


class IdleRecorder:
    """Captures steps in idle time that requests may need and the start left out: with filters,
    edits or structures, under a new policy, after a sleep. It captures one at a time, so a request
    waits for one at most.
    """

    def __init__(self, runner: GpuRunner, recordings: GraphRecordings) -> None:
        self._runner, self._recordings = runner, recordings
        self._for: tuple[Reach, int] | None = None  # policy and times cleared of what is left
        self._left: list[DraftKey | ExtendKey] = []  # the next one last

    def __call__(self, reach: Reach) -> bool:
        """Capture one key. Return False if none is left, memory is short or requests run."""
        graphs, shapes = self._runner.graphs, self._runner.shapes
        if not graphs.spare:
            return False
        for key in self._recordings.wanted():
            self._runner.record(key)
            return True
        if self._for != (reach, graphs.cleared):
            self._for = reach, graphs.cleared
            self._left = [*filter(self._lacks, shapes.captured_later(reach))][::-1]
        while self._left:
            key = self._left.pop()
            if self._lacks(key):
                self._runner.record(key)
                return True
        return False

    def prepared(self, reach: Reach) -> str:
        """Report how many of a policy's kinds of steps have their graphs."""
        if not self._runner.graphs.captures:
            return "its kernels are launched one by one, and loaded when a step first uses them"
        keys = self._runner.shapes.captured(reach)
        lacking = sum(bool(self._lacks(key)) for key in keys)
        found = f"{len(keys) - lacking} of {len(keys)} passes of its steps have their graphs"
        return f"{found}; a step records another when it first uses it, as idle time does"

    def _lacks(self, key: DraftKey | ExtendKey) -> int:
        return unrecorded(key, self._runner.graphs)
