"""Uses idle time to record the steps that requests may bring and the start left out: with filters,
edits or structures, under a policy set since, after a sleep. One at a time, so that a request waits
for one.
"""

from __future__ import annotations

from tlt_server.engine.gpu.runner import GpuRunner
from tlt_server.engine.gpu.start.recordings import GraphRecordings
from tlt_server.engine.gpu.steps.drafts import DraftKey
from tlt_server.engine.gpu.steps.extend import ExtendKey, unrecorded
from tlt_server.speculation.sizes import Reach


class IdleRecorder:
    def __init__(self, runner: GpuRunner, recordings: GraphRecordings) -> None:
        self._runner, self._recordings = runner, recordings
        self._for: tuple[Reach, int] | None = None  # policy and times cleared of what is left
        self._left: list[DraftKey | ExtendKey] = []  # the next one last

    def __call__(self, reach: Reach) -> bool:
        """Record one key; False where none is left, or memory or quiet is lacking."""
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
        """Describe how many kinds of a policy's steps have their graphs."""
        if not self._runner.graphs.captures:
            return "its kernels are launched one by one, and loaded when a step first uses them"
        keys = self._runner.shapes.captured(reach)
        lacking = sum(bool(self._lacks(key)) for key in keys)
        found = f"{len(keys) - lacking} of {len(keys)} passes of its steps have their graphs"
        return f"{found}; a step records another when it first uses it, as idle time does"

    def _lacks(self, key: DraftKey | ExtendKey) -> int:
        return unrecorded(key, self._runner.graphs)
