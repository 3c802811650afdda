"""Metrics of the engine. Its figures arrive as `Outputs.gauges` and `Outputs.cycle`; names missing
in `GAUGES` and `TOTALS` are shown as `tlt_engine_figure{name=...}`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import get_args

from prometheus_client import CollectorRegistry, Gauge, Metric, ProcessCollector
from prometheus_client.registry import Collector

from tlt_server import __version__
from tlt_server.metrics.kinds import Kinds
from tlt_server.metrics.steps import StepMetrics
from tlt_server.wire.events import Ending, EngineInfo, Outputs

GAUGES = {  # name in Outputs.gauges -> (metric, sentence)
    "running": ("tlt_running_sequences", "Sequences that decode."),
    "waiting": ("tlt_waiting_sequences", "Sequences admitted and waiting for a batch slot."),
    "pages_free": ("tlt_pages_free", "KV pages that can be handed out now, cached ones included."),
    "pages": ("tlt_pages", "KV pages in all."),
    "spanning": (
        "tlt_spanning_sequences",
        "Sequences whose KV is of more than one weight version.",
    ),
    "drafters_resting": (
        "tlt_drafters_resting",
        "Drafters that rest because acceptance collapsed after a change of weights.",
    ),
    "cost_error": (
        "tlt_cost_error",
        "Mean relative error of predicted step times, of the recent past.",
    ),
    "expected_rate": (
        "tlt_expected_tokens_per_second",
        "Tokens per second that are expected of steps like the last ones.",
    ),
    "training_slowdown": (
        "tlt_trainer_slowdown",
        "Time of a step while the trainer runs, over its time without.",
    ),
    "structures_bytes": (
        "tlt_structures_bytes",
        "Memory of compiled grammars: those of sequences, and those kept for later ones.",
    ),
    "structures_held_back": (
        "tlt_structures_held_back",
        "Compiled grammars whose sequences wait for memory.",
    ),
    "policy_preparing": (
        "tlt_policy_preparing",
        "1 while the kernels of a policy are compiled or loaded, which is then put in force.",
    ),
    "pages_cached": (
        "tlt_pages_cached",
        "KV pages without a user that the prefix index could still serve.",
    ),
}
OF_DRAFTERS = "outlook_ratio_"  # with a drafter's name
TOTALS = {  # likewise, counted by the engine since it started
    "structures_compiled": (
        "tlt_structures_compiled",
        "Grammars of structured outputs that were compiled.",
    ),
    "structures_cached": (
        "tlt_structures_cached",
        "Sequences whose grammar had been compiled before.",
    ),
    "structures_compile_s": (
        "tlt_structures_compile_seconds",
        "Seconds that compiling grammars took, next to the engine's steps and without queues.",
    ),
    "structures_alone": (
        "tlt_structures_alone",
        "Sequences whose masks took more work than sequences that share a lexer may.",
    ),
    "structures_dropped": (
        "tlt_structures_dropped",
        "Rows that steps left out, as their masks took too long.",
    ),
    "structures_mask_s": (
        "tlt_structures_mask_seconds",
        "Seconds that steps and threads spent on what may follow in a structure.",
    ),
    "drafter_collapses": (
        "tlt_drafter_collapses",
        "Times that acceptance collapsed after a change of weights.",
    ),
    "samples_offered": (
        "tlt_drafter_samples_offered",
        "Finished sequences that were recorded to train the drafter.",
    ),
    "samples_dropped": (
        "tlt_drafter_samples_dropped",
        "Recorded sequences that were dropped, as the ring to the trainer had no room.",
    ),
    "states_captured": (
        "tlt_drafter_features_captured",
        "Recorded sequences whose features went to the trainer.",
    ),
    "states_dropped": (
        "tlt_drafter_features_dropped",
        "Recorded sequences whose features were dropped, as the ring to the trainer had no room.",
    ),
    "states_incomplete": (
        "tlt_drafter_features_incomplete",
        "Recorded sequences without features of one weight version for all of their tokens.",
    ),
    "states_recomputed": (
        "tlt_drafter_features_recomputed",
        "Recorded sequences whose features were computed again in idle time.",
    ),
    "states_s": (
        "tlt_drafter_capture_seconds",
        "Time that the engine's thread spent on handing features to the trainer.",
    ),
    "contained_faults": (
        "tlt_contained_faults",
        "Exceptions that ended one command, one sequence or one figure, and nothing else.",
    ),
    "preemptions": (
        "tlt_preemptions",
        "Sequences preempted: their pages were taken for older ones.",
    ),
}
NONE_WITHOUT_ENGINE = ("running", "waiting", "spanning", "pages_free", "pages_cached")


class EngineMetrics:
    def __init__(self, kinds: Kinds) -> None:
        self._steps = StepMetrics(kinds)
        self._build = kinds.gauge(
            "tlt_build_info",
            "Always 1; what runs.",
            "version",
            "model",
            "numerics",
            "drafter",
            "device",
        )
        self._up = kinds.gauge(
            "tlt_engine_up", "1 while an engine is ready, 0 before and between two epochs of it."
        )
        self.restarts = kinds.counter(
            "tlt_engine_restarts", "Restarts of the engine, by how it ended.", "reason"
        )
        for reason in get_args(Ending):
            self.restarts.labels(reason)
        self._gauges, self._totals = kinds.gauges(GAUGES), kinds.totals(TOTALS)
        self.contained_faults = self._totals["contained_faults"].counter  # the frontend's, too
        self._ratio = kinds.gauge(
            "tlt_sd_accepted_over_predicted",
            "Draft tokens accepted over those predicted, of the recent past; 1: well calibrated.",
            "drafter",
        )
        self._other = kinds.gauge(
            "tlt_engine_figure", "Further figures of the engine, by name.", "name"
        )
        self._others: dict[str, Gauge] = {}
        self.pids: list[int] = []  # by rank

    def ready(self, info: EngineInfo) -> None:
        self.pids = [info.pid, *info.rank_pids]
        self._build.clear()
        self._build.labels(__version__, info.model, info.numerics, info.drafter, info.device).set(1)
        self._gauges["pages"].set(info.pages)
        self._gauges["pages_free"].set(info.pages)
        self._up.set(1)

    def gone(self) -> None:
        self._up.set(0)
        for name in NONE_WITHOUT_ENGINE:
            self._gauges[name].set(0)

    def took(self, message: Outputs) -> None:
        """Record the figures of an `Outputs` message."""
        for name, value in message.gauges.items():
            if name in self._gauges:
                self._gauges[name].set(value)
            elif name in self._totals:
                self._totals[name].follow(value)
            elif name.startswith(OF_DRAFTERS):
                self._ratio.labels(name.removeprefix(OF_DRAFTERS)).set(value)
            else:
                if name not in self._others:
                    self._others[name] = self._other.labels(name)
                self._others[name].set(value)
        for name in [name for name in self._others if name not in message.gauges]:
            self._other.remove(name)  # the policy that reported it is no longer active
            del self._others[name]
        if message.cycle is not None:
            self._steps.count(message.cycle)
        self._steps.switched(message.switches)


class EngineProcesses(Collector):
    """Memory, processor time and files of each process of an engine, by its rank."""

    def __init__(self, pids: Callable[[], Sequence[int]], registry: CollectorRegistry) -> None:
        """`pids`: by rank; processes that have ended are left out."""
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
