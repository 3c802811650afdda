"""The memory, processor time and files of each process of an engine, by its rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from prometheus_client import CollectorRegistry, Metric, ProcessCollector
from prometheus_client.registry import Collector


class EngineProcesses(Collector):
    """Collects what `ProcessCollector` does, of the processes of all ranks."""

    def __init__(self, pids: Callable[[], Sequence[int]], registry: CollectorRegistry) -> None:
        """`pids`: by rank; those that have ended are left out."""
        self._pids = pids
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for rank, pid in enumerate(self._pids()):
            of_rank = ProcessCollector("tlt_engine", pid=partial(str, pid), registry=None)
            for found in of_rank.collect():
                samples = [each._replace(labels={"rank": str(rank)}) for each in found.samples]
                found.samples = []
                families.setdefault(found.name, found).samples += samples
        return families.values()
