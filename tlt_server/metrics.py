"""Every metric name in one place, on one registry of our own.

The frontend counts requests here; the engine's numbers arrive as `Outputs.gauges` and
`Outputs.cycle` and are mapped by `engine_outputs`. A name that `GAUGES` and `TOTALS` do not list
still shows, as `tlt_engine_figure{name=...}`. Every label has a bounded set of values, even when
clients and operators send others.
"""

from __future__ import annotations

import itertools
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from tlt_server import __version__
from tlt_server.errors import codes
from tlt_server.events import Ending, EngineInfo, Outputs, WeightReport
from tlt_server.step_metrics import StepMetrics

LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
TOKEN_S = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1, 2, 5)
HELD_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
PUSH_S = (0.0001, 0.001, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
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
    "pages_cached": (
        "tlt_pages_cached",
        "KV pages without a user that the prefix index could still serve.",
    ),
}
TOTALS = {  # likewise, counted by the engine since it started
    "drafter_collapses": (
        "tlt_drafter_collapses",
        "Times that acceptance collapsed after a change of weights.",
    ),
    "preemptions": (
        "tlt_preemptions",
        "Sequences preempted: their pages were taken for older ones.",
    ),
}
PUSH_RESULTS = (
    "committed",
    "staged",
    "gathering",
    "unchanged",
    "aborted",
    "named",
    "rolled_back",  # and the codes of errors that end one
    "invalid_request",
    "forbidden",
    "not_found",
    "model",
    "weights_refused",
    "channel_broken",
    "conflict",
    "push_failed",
)

disable_created_metrics()  # no reader needs a `_created` series next to every counter


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=True)

        def counter(name: str, sentence: str, *labels: str) -> Counter:
            return Counter(name, sentence, labels, registry=self.registry)

        def gauge(name: str, sentence: str, *labels: str) -> Gauge:
            return Gauge(name, sentence, labels, registry=self.registry)

        def histogram(
            name: str, sentence: str, buckets: tuple[float, ...], *labels: str
        ) -> Histogram:
            return Histogram(name, sentence, labels, buckets=buckets, registry=self.registry)

        self.http_requests = counter(
            "tlt_http_requests", "HTTP requests answered.", "method", "route", "status"
        )
        self.http_s = histogram(
            "tlt_http_request_seconds",
            "From a request's headers to the end of its reply.",
            LATENCY_S,
            "route",
        )
        self.grpc_calls = counter(
            "tlt_grpc_calls",
            "gRPC calls ended; each is a request of its route, too.",
            "method",
            "code",
        )
        self.sequences = counter(
            "tlt_sequences", "Sequences ended, by finish reason or error code.", "result"
        )
        self.rejected = counter(
            "tlt_requests_rejected",
            "HTTP requests refused, by error code; probes and scrapes do not count.",
            "reason",
        )
        self.auth_refusals = counter(
            "tlt_auth_refusals",
            "Requests without the key or scope that they need, by reason.",
            "reason",
        )
        self.file_reads = counter(
            "tlt_file_reads",
            "Files of keys and certificates read at start and after a change, by result.",
            "file",
            "result",
        )
        self.ready = gauge(
            "tlt_ready", "1 when a request sent now would be taken, as /readyz says."
        )
        self.open_sequences = gauge("tlt_open_sequences", "Sequences accepted and not ended.")
        self.open_tokens = gauge(
            "tlt_open_tokens", "Prompt plus max_tokens of sequences accepted and not ended."
        )
        self.forecast_pages = gauge(
            "tlt_forecast_pages", "KV pages that these sequences are expected to need in all."
        )
        self.forecast_wait_s = gauge(
            "tlt_forecast_wait_seconds",
            "Until a sequence accepted now would begin; 0 = at once, or not known.",
        )
        self.loop_held_s = histogram(
            "tlt_loop_held_seconds",
            "Time for which the event loop answered nothing, sampled every 5 ms.",
            HELD_S,
        )
        self.loop_held_longest_s = gauge(
            "tlt_loop_held_longest_seconds", "The longest of these times since the server started."
        )
        self.generated = counter("tlt_generated_tokens", "Tokens given to requests.")
        self.stale = counter(
            "tlt_stale_tokens",
            "Tokens of ended sequences made by another weight version than the one live at the "
            "end.",
        )
        self.prompt = counter(
            "tlt_prompt_tokens", "Prompt tokens of requests accepted, each choice counted."
        )
        self.cached = counter("tlt_cached_tokens", "Prompt tokens served by the prefix index.")
        self.queued_s = histogram(
            "tlt_queue_seconds",
            "From a sequence's arrival at the engine until it was started.",
            LATENCY_S,
        )
        self.first_token_s = histogram(
            "tlt_time_to_first_token_seconds",
            "From acceptance to the first token of a sequence.",
            LATENCY_S,
        )
        self.inter_token_s = histogram(
            "tlt_inter_token_seconds",
            "Between two outputs of a sequence, per token of the second; one observation per "
            "output.",
            TOKEN_S,
        )
        self.end_to_end_s = histogram(
            "tlt_end_to_end_seconds", "From acceptance to the end of a sequence.", LATENCY_S
        )
        self._steps = StepMetrics(self.registry)
        self.build = gauge(
            "tlt_build_info",
            "Always 1; what runs.",
            "version",
            "model",
            "numerics",
            "drafter",
            "device",
        )
        self.up = gauge(
            "tlt_engine_up", "1 while an engine is ready, 0 before and between two epochs of it."
        )
        self.restarts = counter(
            "tlt_engine_restarts", "Restarts of the engine, by how it ended.", "reason"
        )
        for reason in get_args(Ending):
            self.restarts.labels(reason)
        self.weights = gauge(
            "tlt_weight_version_info", "1 for the version that new tokens come from.", "version"
        )
        self.drafter = gauge(
            "tlt_drafter_version_info", "1 for the drafter version in use.", "version"
        )
        self.weight_age_s = gauge("tlt_weight_age_seconds", "Since the weights in use went live.")
        self.drafter_behind = gauge(
            "tlt_drafter_behind_commits",
            "Changes of the target since the drafter in use went live.",
        )
        self.quarantined = gauge(
            "tlt_weights_quarantined",
            "1 while a push that wrote over the weights in use has failed: nothing is served.",
        )
        self.weight_pushes = counter(
            "tlt_weight_pushes",
            "Pushes and rollbacks, by role and result or error code.",
            "role",
            "result",
        )
        self.weight_push_s = histogram(
            "tlt_weight_push_seconds",
            "Phases of pushes; commit is what the loop waits for.",
            PUSH_S,
            "phase",
        )
        self.rollouts = gauge("tlt_rollouts", "Rollouts kept, by status.", "status")
        self.rollout_bytes = gauge("tlt_rollout_bytes", "Size of all rollouts' journals.")
        self.resumed = counter(
            "tlt_resumed_sequences", "Sequences of rollouts given to another engine to go on with."
        )
        self.disk_free = gauge(
            "tlt_disk_free_bytes", "Free on the file system that holds the state directory."
        )
        self.disk_total = gauge(
            "tlt_disk_total_bytes", "Size of the file system that holds the state directory."
        )
        for status in ("running", "done"):
            self.rollouts.labels(status)
        for code in codes():  # from 0 on, so that the first one counts in an `increase`
            self.rejected.labels(code)
        for reason in ("no_key", "unknown_key", "scope", "foreign_name", "foreign_page"):
            self.auth_refusals.labels(reason)
        for file, result in itertools.product(("api_keys", "certificates"), ("read", "refused")):
            self.file_reads.labels(file, result)
        for role, result in itertools.product(("target", "drafter", "all", "none"), PUSH_RESULTS):
            self.weight_pushes.labels(role, result)
        self._live = ("", "")  # target's and drafter's version
        self._engine = {
            name: gauge(metric, sentence) for name, (metric, sentence) in GAUGES.items()
        }
        self._totals = {
            name: counter(metric, sentence) for name, (metric, sentence) in TOTALS.items()
        }
        self._counted = dict.fromkeys(TOTALS, 0.0)
        self._other = gauge("tlt_engine_figure", "Further figures of the engine, by name.", "name")
        self._others: dict[str, Gauge] = {}
        self._engine_pid = 0
        PlatformCollector(registry=self.registry)
        ProcessCollector(registry=self.registry)
        ProcessCollector("tlt_engine", pid=lambda: self._engine_pid, registry=self.registry)

    def file_read(self, file: str, result: str) -> None:
        self.file_reads.labels(file, result).inc()

    def watch_disk(self, directory: Path) -> None:
        """Report the file system of `directory`, made yet or not, from now on."""
        self.disk_free.set_function(lambda: disk(directory).free)
        self.disk_total.set_function(lambda: disk(directory).total)

    def watch_ready(self, is_ready: Callable[[], bool]) -> None:
        self.ready.set_function(is_ready)

    def engine_ready(self, info: EngineInfo) -> None:
        self._engine_pid = info.pid
        self.build.clear()
        self.build.labels(__version__, info.model, info.numerics, info.drafter, info.device).set(1)
        self._set_live(info.weight_version, info.drafter_version)
        self._engine["pages"].set(info.pages)
        self._engine["pages_free"].set(info.pages)
        self.up.set(1)

    def engine_gone(self) -> None:
        self.up.set(0)
        self.quarantined.set(0)  # the next life loads whole versions
        for name in ("running", "waiting", "spanning", "pages_free", "pages_cached"):
            self._engine[name].set(0)

    def weights_reported(self, report: WeightReport) -> None:
        self.quarantined.set(bool(report.state.quarantined))
        self._set_live(report.state.target, report.state.drafter)
        if report.result not in ("looked", "joined", "left"):
            self.weight_pushes.labels(report.role or "none", report.result).inc()
        for phase, seconds in report.phases.items():
            self.weight_push_s.labels(phase).observe(seconds)

    def _set_live(self, target: str, drafter: str) -> None:
        if (target, drafter) == self._live:
            return
        since, before, self._live = time.monotonic(), self._live, (target, drafter)
        if drafter and drafter == before[1]:
            self.drafter_behind.inc()
        else:
            self.drafter_behind.set(0)
        self.weight_age_s.set_function(lambda: time.monotonic() - since)
        for info, version in ((self.weights, target), (self.drafter, drafter)):
            info.clear()
            if version:
                info.labels(version).set(1)

    def engine_outputs(self, message: Outputs) -> None:
        for name, value in message.gauges.items():
            if name in self._engine:
                self._engine[name].set(value)
            elif name in self._totals:
                before, self._counted[name] = self._counted[name], value
                self._totals[name].inc(
                    value - before if value >= before else value
                )  # a new engine counts from 0
            else:
                if name not in self._others:
                    self._others[name] = self._other.labels(name)
                self._others[name].set(value)
        for name in [name for name in self._others if name not in message.gauges]:
            self._other.remove(name)  # the policy that reported it is no longer in force
            del self._others[name]
        if message.cycle is not None:
            self._steps.count(message.cycle)

    def exposition(self) -> bytes:
        return generate_latest(self.registry)


class Disk(NamedTuple):
    total: int  # bytes
    free: int


def disk(directory: Path) -> Disk:
    """The file system that holds `directory`, or would once it is made."""
    usage = shutil.disk_usage(
        next(path for path in (directory, *directory.absolute().parents) if path.exists())
    )
    return Disk(usage.total, usage.free)
