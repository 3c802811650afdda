"""The kinds of metrics, each made on one registry."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client import Histogram as LibraryHistogram

LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)


class Histogram(LibraryHistogram):
    """A histogram that records equal values together."""

    def observe_many(self, value: float, count: int) -> None:
        """Observe the same value `count` times."""
        self._sum.inc(value * count)
        self._buckets[bisect_left(self._upper_bounds, value)].inc(count)


class Total:
    """A counter for another process's counts; a new process counts from 0 again."""

    def __init__(self, counter: Counter) -> None:
        self.counter, self._last = counter, 0.0

    def follow(self, count: float) -> None:
        self.counter.inc(count - self._last if count >= self._last else count)
        self._last = count


Table = Mapping[str, tuple[str, str]]  # name of a figure -> name and sentence of its metric


class Kinds:
    """Creates metrics from a name, a sentence and label names."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def counter(self, name: str, sentence: str, *labels: str) -> Counter:
        return Counter(name, sentence, labels, registry=self._registry)

    def gauge(self, name: str, sentence: str, *labels: str) -> Gauge:
        return Gauge(name, sentence, labels, registry=self._registry)

    def gauges(self, table: Table) -> dict[str, Gauge]:
        return {figure: self.gauge(*metric) for figure, metric in table.items()}

    def totals(self, table: Table) -> dict[str, Total]:
        return {figure: Total(self.counter(*metric)) for figure, metric in table.items()}

    def histogram(
        self, name: str, sentence: str, buckets: tuple[float, ...], *labels: str
    ) -> Histogram:
        return Histogram(name, sentence, labels, buckets=buckets, registry=self._registry)
