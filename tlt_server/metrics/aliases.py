"""Other engines' names for our metrics, for dashboards, autoscalers and routers that read those.

One table per engine maps its names to our metrics. Values are read from ours at every scrape, so
nothing is counted twice. A name without a row has no counterpart here.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import Metric

RATE_S = 5.0  # shortest time between two values that a rate is computed from


@dataclass(frozen=True)
class Summed:
    """One of our metrics under another name, summed over its labels. With `their_label`, our
    `label` is kept under that name, with values converted by `theirs`, which returns None to leave
    a value out.
    """

    source: str
    label: str = ""
    their_label: str = ""
    theirs: Callable[[str], str | None] = str


@dataclass(frozen=True)
class Computed:
    """A gauge computed from our metrics."""

    sentence: str
    value: Callable[[Values], float]


Alias = Summed | Computed


class Values:
    """Our metrics as numbers: the sum over labels, or the rate of that sum per second."""

    def __init__(self, families: Mapping[str, Metric], rates: dict[str, Rate]) -> None:
        self._families, self._rates = families, rates

    def __getitem__(self, name: str) -> float:
        return sum(sample.value for sample in self._families[name].samples)

    def by(self, name: str, label: str) -> dict[str, float]:
        return {sample.labels[label]: sample.value for sample in self._families[name].samples}

    def rate(self, name: str) -> float:
        return self._rates.setdefault(name, Rate()).of(self[name], time.monotonic())

    def ratio(self, part: str, whole: str) -> float:
        return self[part] / self[whole] if self[whole] else 0.0


class Rate:
    """Growth of a counter per second, over the scrapes of the last seconds."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, float]] = deque(maxlen=2)  # time and value

    def of(self, value: float, now_s: float) -> float:
        """Return the growth per second up to `now_s`, 0 at the first call."""
        if not self._marks or now_s - self._marks[-1][0] >= RATE_S:
            self._marks.append((now_s, value))
        then_s, then = self._marks[0]
        return (value - then) / (now_s - then_s) if now_s > then_s else 0.0


def _kv_usage(values: Values) -> float:
    return 1 - values.ratio("tlt_pages_free", "tlt_pages") if values["tlt_pages"] else 0.0


def _accept_length(values: Values) -> float:
    lengths = values.by("tlt_accept_length", "strategy")
    in_force = values.by("tlt_strategy_in_force", "strategy")
    return sum(lengths.get(name, 0.0) * share for name, share in in_force.items())


ABORTED = {"abort": "abort", "abandoned": "abort"}
FINISHED = {"stop": "stop", "length": "length"} | ABORTED
KV_USAGE = Computed("Share of the KV pages that are in use.", _kv_usage)

BOTH: Mapping[str, Alias] = {
    "prompt_tokens": Summed("tlt_prompt_tokens"),
    "generation_tokens": Summed("tlt_generated_tokens"),
    "time_to_first_token_seconds": Summed("tlt_time_to_first_token_seconds"),
    "inter_token_latency_seconds": Summed("tlt_inter_token_seconds"),
    "time_per_output_token_seconds": Summed("tlt_inter_token_seconds"),
    "e2e_request_latency_seconds": Summed("tlt_end_to_end_seconds"),
}
VLLM: Mapping[str, Alias] = {
    **BOTH,
    "num_requests_running": Summed("tlt_running_sequences"),
    "num_requests_waiting": Summed("tlt_waiting_sequences"),
    "kv_cache_usage_perc": KV_USAGE,
    "gpu_cache_usage_perc": KV_USAGE,
    "prefix_cache_queries": Summed("tlt_prompt_tokens"),
    "prefix_cache_hits": Summed("tlt_cached_tokens"),
    "gpu_prefix_cache_queries": Summed("tlt_prompt_tokens"),
    "gpu_prefix_cache_hits": Summed("tlt_cached_tokens"),
    "num_preemptions": Summed("tlt_preemptions"),
    "request_success": Summed("tlt_sequences", "result", "finished_reason", FINISHED.get),
    "request_queue_time_seconds": Summed("tlt_queue_seconds"),
    "spec_decode_num_drafts": Summed(
        "tlt_decodes", "strategy", theirs=lambda name: None if name == "off" else name
    ),
    "spec_decode_num_draft_tokens": Summed("tlt_sd_drafted_tokens"),
    "spec_decode_num_accepted_tokens": Summed("tlt_sd_accepted_tokens"),
    "spec_decode_num_accepted_tokens_per_pos": Summed(
        "tlt_sd_accepted_position", "position", "position", lambda ours: str(int(ours) - 1)
    ),
}
SGLANG: Mapping[str, Alias] = {
    **BOTH,
    "num_running_reqs": Summed("tlt_running_sequences"),
    "num_queue_reqs": Summed("tlt_waiting_sequences"),
    "token_usage": KV_USAGE,
    "gen_throughput": Computed(
        "Tokens per second since the last scrape, or one some seconds ago.",
        lambda values: values.rate("tlt_generated_tokens"),
    ),
    "cache_hit_rate": Computed(
        "Share of all prompt tokens that the prefix index served.",
        lambda values: values.ratio("tlt_cached_tokens", "tlt_prompt_tokens"),
    ),
    "spec_accept_length": Computed(
        "Mean tokens per request and step, last step of the strategy in force.", _accept_length
    ),
    "spec_accept_rate": Computed(
        "Share of all verified drafts that were accepted.",
        lambda values: values.ratio("tlt_sd_accepted_tokens", "tlt_sd_drafted_tokens"),
    ),
    "num_retracted_requests": Summed("tlt_preemptions"),
    "cached_tokens": Summed("tlt_cached_tokens"),
    "num_requests": Summed("tlt_sequences"),
    "num_aborted_requests": Summed("tlt_sequences", "result", theirs=ABORTED.get),
    "queue_time_seconds": Summed("tlt_queue_seconds"),
}


@dataclass(frozen=True)
class Naming:
    """The names of one engine, and the labels that all of its metrics have next to `model_name`."""

    table: Mapping[str, Alias]
    labels: Mapping[str, str]


ENGINES: Mapping[str, Naming] = {
    "vllm": Naming(VLLM, {"engine": "0"}),
    "sglang": Naming(SGLANG, {"engine_type": "unified", "tp_rank": "0", "pp_rank": "0"}),
}


class Aliases:
    """Some engines' names for the metrics of one server, which serves `model`."""

    def __init__(self, engines: Collection[str], model: str) -> None:
        self._engines = {name: each for name, each in ENGINES.items() if name in engines}
        self._model, self._rates = model, dict[str, Rate]()

    def of(self, families: Iterable[Metric]) -> Iterator[Metric]:
        """Return the alias families for our families."""
        ours = {family.name: family for family in families}
        values = Values(ours, self._rates)
        for prefix, engine in self._engines.items():
            labels = {"model_name": self._model, **engine.labels}
            for name, alias in engine.table.items():
                if isinstance(alias, Summed):
                    yield _renamed(f"{prefix}:{name}", alias, ours[alias.source], labels)
                else:
                    gauge = Metric(f"{prefix}:{name}", alias.sentence, "gauge")
                    gauge.add_sample(gauge.name, labels, alias.value(values))
                    yield gauge


def _renamed(name: str, alias: Summed, ours: Metric, labels: Mapping[str, str]) -> Metric:
    sums: dict[tuple[str, ...], tuple[dict[str, str], float]] = {}
    for sample in ours.samples:
        own = {"le": sample.labels["le"]} if "le" in sample.labels else {}
        if alias.label:
            theirs = alias.theirs(sample.labels[alias.label])
            if theirs is None:
                continue
            if alias.their_label:
                own[alias.their_label] = theirs
        suffix = sample.name.removeprefix(ours.name)
        before = sums.get((suffix, *own.values()), ({}, 0.0))[1]
        sums[suffix, *own.values()] = own, before + sample.value
    family = Metric(name, ours.documentation, ours.type)
    for (suffix, *_), (own, value) in sums.items():
        family.add_sample(name + suffix, {**labels, **own}, value)
    return family
