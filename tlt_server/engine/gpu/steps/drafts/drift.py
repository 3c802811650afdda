"""The distance of a device's calibration table from its prior: a gauge that an occasional
asynchronous copy updates.
"""

from __future__ import annotations

import torch

from tlt_kernels.gpu.tensors import CalibrationTable

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
