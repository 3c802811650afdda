"""Metrics of the engine's steps, by strategy: drafter, depth and width. Rows, which may differ in
every step, are a histogram.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import get_args

from prometheus_client import Counter, Gauge

from tlt_server.metrics.kinds import Kinds
from tlt_server.wire.records import Cycle, Strategy, Switch, SwitchReason

STEP_S = (
    0.001,
    0.002,
    0.004,
    0.006,
    0.008,
    0.012,
    0.016,
    0.024,
    0.032,
    0.064,
    0.128,
    0.256,
    0.512,
    1,
    2,
)
STEP_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 384, 512, 1024, 2048, 4096, 8192)
STRATEGIES = 64  # label values; strategies beyond them count as "other"
POSITIONS = 16  # label values; deeper positions count in tlt_sd_accepted_tokens_total only


def kind_of(strategy: Strategy) -> str:
    """Return one of a few labels: `off`, or a drafter with its tree shape."""
    if not strategy.drafter:
        return "off"
    return f"{strategy.drafter} {'tree' if strategy.width > 1 else 'chain'}"


class StepMetrics:
    """Counts the steps; every series of a strategy is looked up once."""

    def __init__(self, kinds: Kinds) -> None:
        self._step_s = kinds.histogram("tlt_step_seconds", "Wall time of an engine step.", STEP_S)
        self._step_rows = kinds.histogram(
            "tlt_step_rows", "Rows that the target computed in an engine step.", STEP_ROWS
        )
        self._cycles = kinds.counter("tlt_cycles", "Engine steps, by strategy.", "strategy")
        self._decodes = kinds.counter(
            "tlt_decodes", "Decoding requests summed over engine steps, by strategy.", "strategy"
        )
        self._sd_drafted = kinds.counter(
            "tlt_sd_drafted_tokens", "Draft rows verified, by strategy.", "strategy"
        )
        self._sd_accepted = kinds.counter(
            "tlt_sd_accepted_tokens", "Draft tokens accepted, by strategy.", "strategy"
        )
        self._sd_position = kinds.counter(
            "tlt_sd_accepted_position",
            "Draft tokens accepted, by strategy and position in the draft; 1 is the first.",
            "strategy",
            "position",
        )
        self._accept_length = kinds.gauge(
            "tlt_accept_length",
            "Mean tokens per request and step, last step of the strategy.",
            "strategy",
        )
        self._strategy = kinds.gauge(
            "tlt_strategy_in_force", "1 for the strategy of the last step.", "strategy"
        )
        self._switches = kinds.counter(
            "tlt_strategy_switches", "Changes of the strategy, by reason.", "reason"
        )
        for reason in get_args(SwitchReason):
            self._switches.labels(reason)
        self._steps = kinds.counter("tlt_steps", "Engine steps, by kind of strategy.", "kind")
        self._predicted_s = kinds.counter(
            "tlt_predicted_step_seconds",
            "Time that the cost model had predicted for steps, by kind of strategy.",
            "kind",
        )
        self._measured_s = kinds.counter(
            "tlt_measured_step_seconds", "Time that the same steps took.", "kind"
        )
        self._prefilled = kinds.counter(
            "tlt_prefill_tokens", "Prompt rows that the target computed."
        )
        self._arms: dict[str, _Arm] = {}
        self._in_force = ""

    def count(self, cycle: Cycle) -> None:
        name = cycle.strategy.shape
        if name not in self._arms and len(self._arms) >= STRATEGIES:
            name = "other"
        if name not in self._arms:
            self._arms[name] = self._arm(name)
        self._step_s.observe(cycle.step_s)
        self._step_rows.observe(cycle.rows)
        self._prefilled.inc(cycle.context.prefill_rows)
        self._arms[name].count(cycle)
        kind = kind_of(cycle.strategy)
        self._steps.labels(kind).inc()
        if cycle.predicted_s > 0:
            self._predicted_s.labels(kind).inc(cycle.predicted_s)
            self._measured_s.labels(kind).inc(cycle.step_s)
        if name != self._in_force:
            if self._in_force:
                self._strategy.labels(self._in_force).set(0)
            self._strategy.labels(name).set(1)
            self._in_force = name

    def switched(self, switches: Iterable[Switch]) -> None:
        for switch in switches:
            self._switches.labels(switch.reason).inc()

    def _arm(self, name: str) -> _Arm:
        return _Arm(
            self._cycles.labels(name),
            self._decodes.labels(name),
            self._sd_drafted.labels(name),
            self._sd_accepted.labels(name),
            self._accept_length.labels(name),
            lambda position: self._sd_position.labels(name, str(position)),
        )


class _Arm:
    """The series of one strategy, looked up once: this runs at every step."""

    def __init__(
        self,
        cycles: Counter,
        decodes: Counter,
        drafted: Counter,
        accepted: Counter,
        accept_length: Gauge,
        new_position: Callable[[int], Counter],
    ) -> None:
        self._cycles, self._decodes = cycles, decodes
        self._drafted, self._accepted = drafted, accepted
        self._accept_length, self._new_position = accept_length, new_position
        self._positions: list[Counter] = []

    def count(self, cycle: Cycle) -> None:
        self._cycles.inc()
        requests, accepted = len(cycle.accepted), sum(cycle.accepted)
        if not requests:
            return
        self._decodes.inc(requests)
        self._accept_length.set(1 + accepted / requests)
        if not cycle.drafted:
            return
        self._drafted.inc(cycle.drafted)
        self._accepted.inc(accepted)
        deepest = min(max(cycle.accepted), POSITIONS)
        while len(self._positions) < deepest:
            self._positions.append(self._new_position(len(self._positions) + 1))
        # index: accepted drafts, the deepest and beyond together; value: number of requests
        reached = [0] * (deepest + 1)
        for count in cycle.accepted:
            reached[min(count, deepest)] += 1
        for position, total in zip(
            reversed(self._positions[:deepest]),
            itertools.accumulate(reversed(reached[1:])),
            strict=True,
        ):
            position.inc(total)
