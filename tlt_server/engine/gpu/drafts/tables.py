"""A device's calibration table as `speculation.learnt.Learnt`: read and written between two steps,
by the arithmetic of its CPU twin.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tlt_kernels.gpu.tensors import CalibrationTable
from tlt_server.speculation.survival import (
    BUCKETS,
    PHASES,
    RANKS,
    Calibration,
    OnlineTable,
    TableRecord,
)


class DeviceTable:
    def __init__(
        self,
        table: CalibrationTable,
        stream: torch.cuda.Stream | None,
        gap_edge_G: Tensor | None = None,
    ) -> None:
        """`stream`: where passes read and correct the table. `gap_edge_G`: of a `Calibration`."""
        self._table, self._stream, self._gap_edge_G = table, stream, gap_edge_G

    def record(self) -> TableRecord:
        return self._read().record()

    def check(self, record: TableRecord) -> None:
        self._read().check(record)

    def restore(self, record: TableRecord) -> None:
        self._change(lambda table: table.restore(record))

    def forget(self) -> None:
        self._change(OnlineTable.forget)

    def _read(self) -> OnlineTable:
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            prior_K, _, hits_K, trials_K = (values_Z.cpu().numpy() for values_Z in self._table)
            edges = None if self._gap_edge_G is None else self._gap_edge_G.cpu().numpy()
        shape = PHASES, RANKS, BUCKETS
        found = (
            OnlineTable(prior_K) if edges is None else Calibration(prior_K.reshape(shape), edges)
        )
        found.count(hits_K, trials_K)
        return found

    def _change(self, change: Callable[[OnlineTable], None]) -> None:
        found = self._read()
        change(found)
        _, *mine = self._table
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            for mine_Z, values_K in zip(
                mine, (found.survival_K, found.hits_K, found.trials_K), strict=True
            ):
                mine_Z.copy_(torch.from_numpy(values_K))
