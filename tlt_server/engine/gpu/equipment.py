"""The runner with all that pushes exchange and sleeps give back, on this rank and on the others."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tlt_server.engine.devices import Equipment
from tlt_server.engine.gpu.idle import IdleRecorder
from tlt_server.engine.gpu.orders import SetDrafterTable, Settle, SwapModels
from tlt_server.engine.gpu.runner import GpuRunner
from tlt_server.engine.gpu.start.maker import Lent
from tlt_server.engine.gpu.start.strategy_kernels import StrategyKernels
from tlt_server.engine.policy_changes import Preparation
from tlt_server.engine.ranks.orders import FreePages
from tlt_server.engine.ranks.ranks import reclaim_on
from tlt_server.engine.ranks.shared_models import key_of
from tlt_server.engine.schedule.sequence import Sequence
from tlt_server.models.gpu.decoder import GpuDecoder
from tlt_server.models.gpu.swapping import swap_networks
from tlt_server.speculation.sizes import Reach
from tlt_server.speculation.survival import Calibration
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
        """`kernels`: those of strategies, where they are compiled ahead."""
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
                edges, survivals = table.gap_edges, table.survival_K
                self.ranks.order(SetDrafterTable(edges.view("<i4"), survivals.view("<i4")))
            drafts.install(changed)

    def _swap(self, resident: object, other: object) -> None:
        """Let the other ranks exchange these two, which they know by their storage, while this one
        does.
        """
        if resident is not other:
            self.ranks.order(SwapModels(key_of(resident), key_of(other)))

    def free(self) -> None:
        self.ranks.order(FreePages(), wait=True)
        self._lent.free()

    def reclaim(self) -> None:
        self._lent.reclaim()
        reclaim_on(self.ranks, self._lent.free)
