"""Metrics of a fleet: bounded names, moves by reason, and none on a server without replicas."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from tlt_client.wire import ReplicaStatus
from tlt_server.metrics import Metrics
from tlt_server.metrics.fleet import NAMES


def exposed(metrics: Metrics) -> dict[tuple[str, str], float]:
    """Return the values of the fleet's metrics, by name and label."""
    text = metrics.exposition().text.decode()
    return {
        (sample.name, "".join(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith(("tlt_replica", "tlt_move", "tlt_tokens_read", "tlt_catch"))
    }


def test_server_without_a_fleet_exposes_no_replicas() -> None:
    assert exposed(Metrics()) == {}


def test_replicas_beyond_the_bound_are_counted_together() -> None:
    metrics = Metrics()
    replicas = [
        ReplicaStatus(name=f"r{i:03}", state="ready" if i else "lost", running=i, waiting=1)
        for i in range(NAMES + 3)
    ]
    metrics.fleet.watch(lambda: replicas[::-1])
    found = exposed(metrics)
    assert found["tlt_replicas", "lost"] == 1 and found["tlt_replicas", "ready"] == NAMES + 2
    assert found["tlt_replicas", "joining"] == 0
    running = {label: v for (name, label), v in found.items() if "running" in name}
    assert len(running) == NAMES + 1 and running["other"] == 3 * NAMES + 3
    assert running["r005"] == 5 and found["tlt_replica_waiting_sequences", "other"] == 3


def test_moves_are_counted_by_reason_with_their_tokens() -> None:
    metrics = Metrics()
    metrics.fleet.watch(lambda: [])
    metrics.fleet.moved("lost", 300)
    metrics.fleet.moved("lost", 20)
    metrics.fleet.moved("drained", 7)
    metrics.fleet.caught_up()
    found = exposed(metrics)
    assert {reason for name, reason in found if name == "tlt_moves_total"} == {
        *("lost", "drained", "waiting", "balance", "consolidate")
    }
    assert found["tlt_moves_total", "lost"] == 2 and found["tlt_moves_total", "drained"] == 1
    assert found["tlt_tokens_read_again_total", ""] == 327
    assert found["tlt_catch_ups_total", ""] == 1
