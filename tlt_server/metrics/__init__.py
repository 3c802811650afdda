"""Every metric name in one place, on one registry of our own, in one record for each subject.

The frontend counts requests here, and hands over the engine's figures as they arrive. Every label
has a bounded set of values, even when clients and operators send others.
"""

from __future__ import annotations

from prometheus_client import (
    CollectorRegistry,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from tlt_server.events import EngineInfo
from tlt_server.metrics.disk import DiskMetrics
from tlt_server.metrics.engine import EngineMetrics
from tlt_server.metrics.exchanges import ExchangeMetrics
from tlt_server.metrics.kinds import Kinds
from tlt_server.metrics.rollouts import RolloutMetrics
from tlt_server.metrics.samples import SampleMetrics
from tlt_server.metrics.sequences import SequenceMetrics
from tlt_server.metrics.training import TrainingMetrics
from tlt_server.metrics.weights import WeightMetrics

disable_created_metrics()  # no reader needs a `_created` series next to every counter


class Metrics:
    """The metrics of one server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        kinds = Kinds(self.registry)
        self.exchanges = ExchangeMetrics(kinds)
        self.sequences = SequenceMetrics(kinds)
        self.engine = EngineMetrics(kinds)
        self.weights = WeightMetrics(kinds)
        self.rollouts = RolloutMetrics(kinds)
        self.disk = DiskMetrics(kinds)
        self.samples = SampleMetrics(kinds)
        self.training = TrainingMetrics(kinds)
        PlatformCollector(registry=self.registry)
        ProcessCollector(registry=self.registry)
        ProcessCollector("tlt_engine", pid=lambda: self.engine.pid, registry=self.registry)

    def engine_ready(self, info: EngineInfo) -> None:
        self.engine.ready(info)
        self.weights.live(info.weight_version, info.drafter_version)

    def engine_gone(self) -> None:
        self.engine.gone()
        self.weights.engine_gone()

    def exposition(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)
