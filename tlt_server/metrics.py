"""Every metric name in one place, on one registry of our own.

The frontend counts requests here; the engine's numbers arrive as `Outputs.gauges` and `Outputs.cycle` and are mapped by
`engine_outputs`. A gauge name that `GAUGES` does not list still shows, as `tlt_engine_gauge{name=...}`.
"""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

from tlt_server import __version__
from tlt_server.records import EngineInfo, Outputs, WeightReport

LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
PUSH_S = (0.0001, 0.001, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
STEP_S = (0.001, 0.002, 0.004, 0.006, 0.008, 0.012, 0.016, 0.024, 0.032, 0.064, 0.128, 0.256, 0.512, 1, 2)

GAUGES = {  # name in Outputs.gauges -> (metric, sentence)
    "running": ("tlt_running_sequences", "Sequences that decode."),
    "waiting": ("tlt_waiting_sequences", "Sequences admitted and waiting for a slot."),
    "pages_free": ("tlt_pages_free", "KV pages that can be handed out now, cached ones included."),
    "pages_total": ("tlt_pages_total", "KV pages in all."),
    "spanning": ("tlt_spanning_sequences", "Sequences whose KV is of more than one weight version."),
    "preemptions": ("tlt_preemptions", "Sequences preempted since start."),
    "pages_cached": ("tlt_pages_cached", "KV pages that nobody uses and the prefix index could still serve."),
}

disable_created_metrics()  # a `_created` series beside every counter tells nobody anything


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=True)

        def counter(name: str, sentence: str, *labels: str) -> Counter:
            return Counter(name, sentence, labels, registry=self.registry)

        def gauge(name: str, sentence: str, *labels: str) -> Gauge:
            return Gauge(name, sentence, labels, registry=self.registry)

        def histogram(name: str, sentence: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(name, sentence, labels, buckets=buckets, registry=self.registry)

        self.sequences = counter("tlt_sequences", "Sequences ended, by finish reason or error code.", "result")
        self.rejected = counter("tlt_requests_rejected", "HTTP requests refused, by error code.", "reason")
        self.open_sequences = gauge("tlt_open_sequences", "Sequences accepted and not ended.")
        self.open_tokens = gauge("tlt_open_tokens", "Prompt plus max_tokens of sequences accepted and not ended.")
        self.forecast_pages = gauge("tlt_forecast_pages", "KV pages that these sequences are expected to need in all.")
        self.forecast_wait_s = gauge("tlt_forecast_wait_seconds", "Until a sequence accepted now would begin; 0 = at once, or not known.")
        self.generated = counter("tlt_generated_tokens", "Tokens given to requests.")
        self.prompt = counter("tlt_prompt_tokens", "Prompt tokens of requests accepted, each choice counted.")
        self.prefilled = counter("tlt_prefill_tokens", "Prompt rows that the target computed.")
        self.cached = counter("tlt_cached_tokens", "Prompt tokens served by the prefix index.")
        self.first_token_s = histogram("tlt_time_to_first_token_seconds", "From acceptance to the first token of a sequence.", LATENCY_S)
        self.end_to_end_s = histogram("tlt_end_to_end_seconds", "From acceptance to the end of a sequence.", LATENCY_S)
        self.step_s = histogram("tlt_step_seconds", "Wall time of an engine step.", STEP_S)
        self.cycles = counter("tlt_cycles", "Engine steps, by strategy.", "strategy")
        self.sd_drafted = counter("tlt_sd_drafted_tokens", "Draft rows verified, by strategy.", "strategy")
        self.sd_accepted = counter("tlt_sd_accepted_tokens", "Draft tokens accepted, by strategy.", "strategy")
        self.accept_length = gauge("tlt_accept_length", "Mean tokens per request and step, last step of the strategy.", "strategy")
        self.strategy = gauge("tlt_strategy_in_force", "1 for the strategy of the last step.", "strategy")
        self.build = gauge("tlt_build_info", "Always 1; what runs.", "version", "model", "numerics", "drafter", "device")
        self.weights = gauge("tlt_weight_version_info", "1 for the version that new tokens come from.", "version")
        self.drafter = gauge("tlt_drafter_version_info", "1 for the drafter version in use.", "version")
        self.weight_age_s = gauge("tlt_weight_age_seconds", "Since the weights in use went live.")
        self.weight_pushes = counter("tlt_weight_pushes", "Pushes and rollbacks, by role and result or error code.", "role", "result")
        self.weight_push_s = histogram("tlt_weight_push_seconds", "Phases of pushes; commit is what the loop waits for.", PUSH_S, "phase")
        self._live = ("", "")  # target's and drafter's version
        self._engine = {name: gauge(metric, sentence) for name, (metric, sentence) in GAUGES.items()}
        self._other = gauge("tlt_engine_gauge", "Further gauges of the engine, by name.", "name")
        self._in_force = ""
        self._seen: set[str] = set()

    def engine_ready(self, info: EngineInfo) -> None:
        self.build.labels(__version__, info.model, info.numerics, info.drafter, info.device).set(1)
        self._set_live(info.weight_version, info.drafter_version)
        self._engine["pages_total"].set(info.pages)
        self._engine["pages_free"].set(info.pages)

    def weights_reported(self, report: WeightReport) -> None:
        self._set_live(report.state.target, report.state.drafter)
        if report.result != "looked":
            self.weight_pushes.labels(report.role or "none", report.result).inc()
        for phase, seconds in report.phases.items():
            self.weight_push_s.labels(phase).observe(seconds)

    def _set_live(self, target: str, drafter: str) -> None:
        if (target, drafter) == self._live:
            return
        since, self._live = time.monotonic(), (target, drafter)
        self.weight_age_s.set_function(lambda: time.monotonic() - since)
        for info, version in ((self.weights, target), (self.drafter, drafter)):
            info.clear()
            if version:
                info.labels(version).set(1)

    def engine_outputs(self, message: Outputs) -> None:
        for name, value in message.gauges.items():
            (self._engine[name] if name in self._engine else self._other.labels(name)).set(value)
        for name in self._seen - message.gauges.keys() - self._engine.keys():
            self._other.remove(name)  # of a policy that is no longer in force
        self._seen = set(message.gauges)
        cycle = message.cycle
        if cycle is None:
            return
        name = cycle.strategy.name
        self.step_s.observe(cycle.step_s)
        self.cycles.labels(name).inc()
        self.prefilled.inc(cycle.context.prefill_rows)
        if cycle.drafted:
            self.sd_drafted.labels(name).inc(cycle.drafted)
            self.sd_accepted.labels(name).inc(sum(cycle.accepted))
        if cycle.accepted:
            self.accept_length.labels(name).set(1 + sum(cycle.accepted) / len(cycle.accepted))
        if name != self._in_force:
            if self._in_force:
                self.strategy.labels(self._in_force).set(0)
            self.strategy.labels(name).set(1)
            self._in_force = name

    def exposition(self) -> bytes:
        return generate_latest(self.registry)
