"""Metrics of weights: the live versions, and the results of pushes."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping

from tlt_server.metrics.kinds import Kinds
from tlt_server.wire.events import WeightReport

PUSH_S = (0.0001, 0.001, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
PUSH_RESULTS = (
    "committed",
    "staged",
    "gathering",
    "unchanged",
    "aborted",
    "named",
    "rolled_back",
    "unloaded",  # and the codes of errors that end one
    "invalid_request",
    "forbidden",
    "not_found",
    "model",
    "weights_refused",
    "channel_broken",
    "conflict",
    "push_failed",
)
ROLES = ("target", "drafter", "all", "adapter", "none")
QUESTIONS = ("looked", "joined", "left")  # results of commands that push nothing


class WeightMetrics:
    def __init__(self, kinds: Kinds) -> None:
        self._target = kinds.gauge(
            "tlt_weight_version_info", "1 for the version that new tokens come from.", "version"
        )
        self._drafter = kinds.gauge(
            "tlt_drafter_version_info",
            "1 for the drafter version in use.",
            "version",
            "quantization",
        )
        self._age_s = kinds.gauge("tlt_weight_age_seconds", "Since the weights in use went live.")
        self._drafter_behind = kinds.gauge(
            "tlt_drafter_behind_commits",
            "Changes of the target since the drafter in use went live.",
        )
        self._quarantined = kinds.gauge(
            "tlt_weights_quarantined",
            "1 while a push that wrote over the weights in use has failed: nothing is served.",
        )
        self._adapters = kinds.gauge(
            "tlt_lora_adapter_info", "1 for each LoRA adapter that is loaded.", "name", "version"
        )
        self._asked = kinds.counter(
            "tlt_lora_sequences", "Sequences accepted for each LoRA adapter that is loaded.", "name"
        )
        self._loaded: set[str] = set()
        self._pushes = kinds.counter(
            "tlt_weight_pushes",
            "Pushes and rollbacks, by role and result or error code.",
            "role",
            "result",
        )
        self._push_s = kinds.histogram(
            "tlt_weight_push_seconds",
            "Phases of pushes; commit is what the loop waits for.",
            PUSH_S,
            "phase",
        )
        for role, result in itertools.product(ROLES, PUSH_RESULTS):
            self._pushes.labels(role, result)
        self._live = ("", "")  # target's and drafter's version
        self._drafting = ("", "")  # the drafter's version and quantization

    def reported(self, report: WeightReport) -> None:
        self._quarantined.set(bool(report.state.quarantined))
        state = report.state
        self.live(state.target, state.drafter, state.drafter_quantization)
        self.load(report.state.adapters)
        if report.result not in QUESTIONS:
            self._pushes.labels(report.role or "none", report.result).inc()
        for phase, seconds in report.phases.items():
            self._push_s.labels(phase).observe(seconds)

    def engine_gone(self) -> None:
        self._quarantined.set(0)  # the next epoch loads whole versions
        self.load({})

    def load(self, adapters: Mapping[str, str]) -> None:
        """Show these adapters, by name, and drop others: a trainer may name each of its steps."""
        self._adapters.clear()
        for adapter in adapters.items():
            self._adapters.labels(*adapter).set(1)
        for name in self._loaded - adapters.keys():
            self._asked.remove(name)
        for name in adapters.keys() - self._loaded:
            self._asked.labels(name)
        self._loaded = {*adapters}

    def asked(self, adapter: str, sequences: int) -> None:
        """Count accepted sequences for an adapter."""
        if adapter in self._loaded:
            self._asked.labels(adapter).inc(sequences)

    def live(self, target: str, drafter: str, quantization: str) -> None:
        """Show the live versions, and the time of their last change. `quantization`: the
        drafter's.
        """
        if (drafter, quantization) != self._drafting:
            self._drafting = drafter, quantization
            self._drafter.clear()
            if drafter:
                self._drafter.labels(drafter, quantization).set(1)
        if (target, drafter) == self._live:
            return
        since, before, self._live = time.monotonic(), self._live, (target, drafter)
        if drafter and drafter == before[1]:
            self._drafter_behind.inc()
        else:
            self._drafter_behind.set(0)
        self._age_s.set_function(lambda: time.monotonic() - since)
        self._target.clear()
        if target:
            self._target.labels(target).set(1)
