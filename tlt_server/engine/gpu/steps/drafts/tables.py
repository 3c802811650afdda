"""A device's calibration table as a `speculation.learnt.Learnt`: read and written between two
steps, with the arithmetic of its CPU twin. Its distance from its prior is a gauge that an
occasional asynchronous copy updates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tlt_kernels.gpu.tensors import CalibrationTable
from tlt_server.speculation.calibration import (
    BUCKETS,
    PHASES,
    RANKS,
    Calibration,
    OnlineTable,
    TableRecord,
)

OnWrite = Callable[[NDArray[Any], NDArray[Any], NDArray[Any]], None]


class DeviceTable:
    def __init__(
        self,
        table: CalibrationTable,
        stream: torch.cuda.Stream | None,
        gap_edge_G: Tensor | None = None,
        in_force_Z: Tensor | None = None,
    ) -> None:
        """`stream`: on which passes read and correct the table. `gap_edge_G`: of a `Calibration`.
        `in_force_Z`: the active probabilities, if trees are grown with a held copy.
        """
        self._table, self._stream, self._gap_edge_G = table, stream, gap_edge_G
        self._in_force_Z = in_force_Z
        # Other ranks learn first what is about to be written or activated.
        self.on_write: OnWrite = lambda *values: None
        self.on_renew: Callable[[], None] = lambda: None

    def record(self) -> TableRecord:
        return self._read().record()

    def check(self, record: TableRecord) -> None:
        self._read().check(record)

    def restore(self, record: TableRecord) -> None:
        self._change(lambda table: table.restore(record))

    def forget(self) -> None:
        self._change(OnlineTable.forget)

    def renew(self) -> NDArray[np.float32]:
        """Activate the learned values, and return them."""
        self.on_renew()
        acceptance_Z = self._table.acceptance_Z
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            if self._in_force_Z is not None:
                self._in_force_Z.copy_(acceptance_Z)
            found: NDArray[np.float32] = acceptance_Z.cpu().numpy().copy()
        return found

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
        values = (
            found.acceptance_K.astype(np.float32),
            found.hits_K.astype(np.int32),
            found.trials_K.astype(np.int32),
        )
        self.on_write(*values)
        self.write(*values)
        self.renew()

    def write(self, *values: NDArray[Any]) -> None:
        """Set acceptance probabilities, hits and trials."""
        _, *mine = self._table
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            for mine_Z, values_K in zip(mine, values, strict=True):
                mine_Z.copy_(torch.from_numpy(values_K))


# Verified passes between two readings; a reading is a few small kernels on the passes' own stream.
EVERY = 64


class Drift:
    def __init__(self, calibration: CalibrationTable) -> None:
        self._calibration = calibration
        on_gpu = calibration.prior_Z.is_cuda
        self._read_1 = torch.zeros(1, pin_memory=on_gpu)
        self._event = torch.cuda.Event() if on_gpu else None
        self._passes, self._reading, self._value = 0, False, 0.0

    def observed(self) -> None:
        """Note that a pass has just been queued on the current stream."""
        self._passes += 1
        if self._passes % EVERY:
            return
        table = self._calibration
        weighed = ((table.acceptance_Z - table.prior_Z).abs() * table.trials_Z).sum(0, keepdim=True)
        self._read_1.copy_(weighed / table.trials_Z.sum().clamp(min=1), non_blocking=True)
        if self._event is not None:
            self._event.record()
        self._reading = True

    @property
    def value(self) -> float:
        """Return the table's mean distance from its prior over the observed nodes, as of the last
        copy that has arrived.
        """
        if self._reading and (self._event is None or self._event.query()):
            self._value, self._reading = float(self._read_1), False
        return self._value
