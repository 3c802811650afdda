"""Rollouts and the file system that holds the state directory, with their metrics."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

from tlt_server.metrics.kinds import Kinds


class RolloutMetrics:
    def __init__(self, kinds: Kinds) -> None:
        self.kept = kinds.gauge("tlt_rollouts", "Rollouts kept, by status.", "status")
        self.bytes = kinds.gauge("tlt_rollout_bytes", "Size of all rollouts' journals.")
        self.resumed = kinds.counter(
            "tlt_resumed_sequences", "Sequences of rollouts given to another engine to go on with."
        )
        for status in ("running", "done"):
            self.kept.labels(status)


class DiskMetrics:
    def __init__(self, kinds: Kinds) -> None:
        self._free = kinds.gauge(
            "tlt_disk_free_bytes", "Free on the file system that holds the state directory."
        )
        self._total = kinds.gauge(
            "tlt_disk_total_bytes", "Size of the file system that holds the state directory."
        )

    def watch(self, directory: Path) -> None:
        """Report the file system of `directory`, made yet or not, from now on."""
        self._free.set_function(lambda: disk(directory).free)
        self._total.set_function(lambda: disk(directory).total)


class Disk(NamedTuple):
    total: int  # bytes
    free: int


def disk(directory: Path) -> Disk:
    """Return the size of the file system that holds `directory`, or would once it is made."""
    usage = shutil.disk_usage(
        next(path for path in (directory, *directory.absolute().parents) if path.exists())
    )
    return Disk(usage.total, usage.free)
