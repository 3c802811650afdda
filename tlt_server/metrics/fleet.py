"""Metrics of a fleet: its replicas, and moves between them. A server without one shows none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from tlt_client.wire import ReplicaState, ReplicaStatus

MoveReason = Literal["lost", "drained", "waiting", "balance", "consolidate"]
NAMES = 64  # replicas with a label of their own; the rest are `other`


class FleetMetrics(Collector):
    def __init__(self, registry: CollectorRegistry) -> None:
        self._status: Callable[[], Sequence[ReplicaStatus]] | None = None
        self._moves = Counter[str](dict.fromkeys(get_args(MoveReason), 0))
        self._read_again = self._catch_ups = 0
        registry.register(self)

    def watch(self, status: Callable[[], Sequence[ReplicaStatus]]) -> None:
        """Show this fleet."""
        self._status = status

    def moved(self, reason: MoveReason, tokens: int) -> None:
        """Count a moved sequence. `tokens`: those that its new replica reads again."""
        self._moves[reason] += 1
        self._read_again += tokens

    def caught_up(self) -> None:
        """Count a replica that has taken committed weights from another."""
        self._catch_ups += 1

    def collect(self) -> Iterable[Metric]:
        if self._status is None:
            return
        replicas = sorted(self._status(), key=lambda each: each.name)
        states = Counter[str](dict.fromkeys(get_args(ReplicaState), 0))
        running, waiting = Counter[str](), Counter[str]()
        for number, replica in enumerate(replicas):
            name = replica.name if number < NAMES else "other"
            states[replica.state] += 1
            running[name] += replica.running
            waiting[name] += replica.waiting
        yield _gauge("tlt_replicas", "Replicas, by state.", "state", states)
        yield _gauge(
            "tlt_replica_running_sequences", "Sequences that decode there.", "replica", running
        )
        yield _gauge(
            "tlt_replica_waiting_sequences", "Sequences that wait there.", "replica", waiting
        )
        moves = CounterMetricFamily(
            "tlt_moves", "Sequences moved to another replica, by reason.", labels=["reason"]
        )
        for reason, count in self._moves.items():
            moves.add_metric([reason], count)
        yield moves
        yield CounterMetricFamily(
            "tlt_tokens_read_again", "Tokens that moved sequences read again.", self._read_again
        )
        yield CounterMetricFamily(
            "tlt_catch_ups", "Replicas that took committed weights from others.", self._catch_ups
        )


def _gauge(name: str, sentence: str, label: str, values: Mapping[str, int]) -> Metric:
    family = GaugeMetricFamily(name, sentence, labels=[label])
    for value, count in values.items():
        family.add_metric([value], count)
    return family
