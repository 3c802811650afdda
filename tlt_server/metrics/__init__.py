"""Every metric name in one place, on one registry of our own, in one record per subject.

The frontend counts requests here, and passes on the engine's figures as they arrive. Every label
has a bounded set of values, even if clients and operators send others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from prometheus_client import (
    CONTENT_TYPE_PLAIN_0_0_4,
    CollectorRegistry,
    Metric,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.openmetrics import exposition as openmetrics

from tlt_server.metrics.aliases import Aliases
from tlt_server.metrics.engine import EngineMetrics, EngineProcesses
from tlt_server.metrics.fleet import FleetMetrics
from tlt_server.metrics.kinds import Kinds
from tlt_server.metrics.requests import (
    DiskMetrics,
    ExchangeMetrics,
    RolloutMetrics,
    SequenceMetrics,
)
from tlt_server.metrics.training import SampleMetrics, TrainingMetrics
from tlt_server.metrics.weights import WeightMetrics
from tlt_server.wire.events import EngineInfo

disable_created_metrics()  # no reader needs a `_created` series next to every counter


OPENMETRICS = "application/openmetrics-text"


class Exposition(NamedTuple):
    text: bytes
    media_type: str


class Metrics:
    """The metrics of one server, which serves `model`; also under some other engines' names."""

    def __init__(self, aliases: Collection[str] = (), model: str = "") -> None:
        self._aliases = Aliases(aliases, model)
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
        self.fleet = FleetMetrics(self.registry)
        PlatformCollector(registry=self.registry)
        ProcessCollector(registry=self.registry)
        EngineProcesses(lambda: self.engine.pids, self.registry)

    def engine_ready(self, info: EngineInfo) -> None:
        self.engine.ready(info)
        self.weights.live(info.weight_version, info.drafter_version, info.drafter_quantization)
        self.weights.load(info.adapters)

    def engine_gone(self) -> None:
        self.engine.gone()
        self.weights.engine_gone()

    def collect(self) -> Iterable[Metric]:
        families = list(self.registry.collect())
        return [*families, *self._aliases.of(families)]

    def exposition(self, accept: str = "") -> Exposition:
        """Return all metrics in the format that an `Accept` header requests: OpenMetrics if it
        names that, else Prometheus' text format.
        """
        named = {part.partition(";")[0].strip().lower() for part in accept.split(",")}
        if OPENMETRICS in named:
            # The default escaping makes an underscore of the colon in an engine's names.
            text = openmetrics.generate_latest(self, escaping=openmetrics.ALLOWUTF8)
            return Exposition(text, openmetrics.CONTENT_TYPE_LATEST)
        return Exposition(generate_latest(self), CONTENT_TYPE_PLAIN_0_0_4)
