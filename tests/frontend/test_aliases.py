"""Metrics under the names of other engines, and the format that a scrape asks for."""

from pathlib import Path

import httpx
import pytest
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as openmetrics_families,
)
from prometheus_client.parser import text_string_to_metric_families

from tests.frontend.live_server import live_server, server_and_client
from tests.frontend.test_metrics import EAGLE, series, step
from tlt_server.config import load
from tlt_server.errors import StartupError
from tlt_server.metrics import Metrics
from tlt_server.metrics.aliases import ENGINES, RATE_S, Rate, Summed
from tlt_server.wire.records import OFF

VLLM = {"engine": "0", "model_name": "demo"}
SGLANG = {"engine_type": "unified", "model_name": "demo", "pp_rank": "0", "tp_rank": "0"}


def sums(metrics: Metrics) -> dict[str, float]:
    """Sample name -> sum over its label values."""
    found = series(metrics.exposition().text.decode())
    return {name: sum(values.values()) for name, values in found.items()}


@pytest.mark.parametrize("engine", ENGINES)
def test_every_metric_alias_is_exposed_with_its_engines_labels(engine: str) -> None:
    metrics = Metrics([engine], "demo")
    step(metrics, EAGLE, [2, 0], drafted=9)
    metrics.sequences.ended.labels("stop").inc()
    metrics.sequences.ended.labels("abort").inc()
    families = {
        family.name: family
        for family in text_string_to_metric_families(metrics.exposition().text.decode())
    }
    for name in ENGINES[engine].table:
        samples = families[f"{engine}:{name}"].samples
        assert samples, name
        for sample in samples:
            assert {"model_name": "demo", **ENGINES[engine].labels}.items() <= sample.labels.items()


def test_metric_aliases_are_off_by_default() -> None:
    assert not [name for name in sums(Metrics()) if ":" in name]


def test_aliases_have_the_types_and_help_of_our_metrics() -> None:
    metrics = Metrics(ENGINES, "demo")
    families = {family.name: family for family in metrics.collect()}
    for prefix, engine in ENGINES.items():
        for name, alias in engine.table.items():
            shown = families[f"{prefix}:{name}"]
            if isinstance(alias, Summed):
                ours = families[alias.source]
                assert (shown.type, shown.documentation) == (ours.type, ours.documentation)
            else:
                assert (shown.type, shown.documentation) == ("gauge", alias.sentence)


def test_vllm_metric_aliases_show_the_servers_values() -> None:
    metrics = Metrics(["vllm"], "demo")
    gauges = {"running": 3, "waiting": 5, "pages": 100, "pages_free": 25}
    step(metrics, OFF, [0, 0, 0], **gauges)
    step(metrics, EAGLE, [0, 2, 5, 2], drafted=60, **gauges)
    for result in ("stop", "stop", "length", "abort", "abandoned", "queue_timeout"):
        metrics.sequences.ended.labels(result).inc()
    found = series(metrics.exposition().text.decode())
    for name, value in {
        "num_requests_running": 3,
        "num_requests_waiting": 5,
        "kv_cache_usage_perc": 0.75,
        "gpu_cache_usage_perc": 0.75,
        "spec_decode_num_drafts_total": 4,
        "spec_decode_num_draft_tokens_total": 60,
        "spec_decode_num_accepted_tokens_total": 9,
    }.items():
        assert found[f"vllm:{name}"] == {tuple(VLLM.values()): value}, name
    finished = {labels[1]: n for labels, n in found["vllm:request_success_total"].items()}
    assert finished == {"stop": 2, "length": 1, "abort": 2}
    by_position = found["vllm:spec_decode_num_accepted_tokens_per_pos_total"]
    assert {labels[-1]: n for labels, n in by_position.items()} == {
        "0": 3,
        "1": 3,
        "2": 1,
        "3": 1,
        "4": 1,
    }


def test_sglang_metric_aliases_show_the_servers_values() -> None:
    metrics = Metrics(["sglang"], "demo")
    gauges = {"running": 3, "waiting": 5, "pages": 100, "pages_free": 25}
    step(metrics, EAGLE, [0, 2, 5, 2], drafted=60, **gauges)
    metrics.sequences.prompt.inc(40)
    metrics.sequences.cached.inc(10)
    metrics.sequences.ended.labels("abandoned").inc()
    metrics.sequences.ended.labels("stop").inc()
    found = sums(metrics)
    for name, value in {
        "num_running_reqs": 3,
        "num_queue_reqs": 5,
        "token_usage": 0.75,
        "cache_hit_rate": 0.25,
        "spec_accept_length": 3.25,
        "spec_accept_rate": 0.15,
        "num_requests_total": 2,
        "num_aborted_requests_total": 1,
        "gen_throughput": 0,
    }.items():
        assert found[f"sglang:{name}"] == pytest.approx(value), name
    step(metrics, OFF, [0], **gauges)
    assert sums(metrics)["sglang:spec_accept_length"] == 1


def test_alias_gauges_are_0_before_the_first_step() -> None:
    found = sums(Metrics(["sglang"], "demo"))
    names = ("token_usage", "gen_throughput", "cache_hit_rate", "spec_accept_length")
    assert [found[f"sglang:{name}"] for name in names] == [0, 0, 0, 0]


def test_rate_covers_the_last_seconds_at_any_scrape_interval() -> None:
    rate = Rate()
    assert rate.of(100, 0.0) == 0
    assert rate.of(200, 1.0) == 100
    assert rate.of(200 + 10 * RATE_S, 1.0 + RATE_S) == pytest.approx(
        (100 + 10 * RATE_S) / (1.0 + RATE_S)
    )
    for second in range(1, 61):
        last = rate.of(1000 + 7 * second, 100.0 + second)
    assert last == pytest.approx(7)


def test_histograms_are_equal_under_every_alias(model: Path) -> None:
    with server_and_client(model, metrics_aliases="vllm, sglang", probe_port=0) as (server, client):
        client.generate([{"prompt": "abc"}] * 3, sampling={"max_tokens": 9})
        found = series(httpx.get(f"{server.probe_url}/metrics").text)
    for ours, theirs in {
        "tlt_time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
        "tlt_inter_token_seconds": "vllm:inter_token_latency_seconds",
        "tlt_end_to_end_seconds": "sglang:e2e_request_latency_seconds",
    }.items():
        for suffix in ("_bucket", "_sum", "_count"):
            assert [*found[theirs + suffix].values()] == [*found[ours + suffix].values()]
    (generated,) = found["vllm:generation_tokens_total"].values()
    assert generated == found["tlt_generated_tokens_total"][()] == 27
    assert len(found["vllm:e2e_request_latency_seconds_count"]) == 1


def test_alias_of_an_unknown_engine_is_refused(model: Path) -> None:
    assert load({"model": str(model), "metrics_aliases": "vllm,"}).aliases == ("vllm",)
    with pytest.raises(StartupError, match=r"names 'vlm'; did you mean vllm.*known are vllm, sgl"):
        load({"model": str(model), "metrics_aliases": "vlm"})


PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)


def test_openmetrics_is_sent_on_request(model: Path) -> None:
    with live_server(model, metrics_aliases="vllm,sglang") as server:
        for accept, openmetrics in (
            (PROMETHEUS_3, True),
            ("Application/OpenMetrics-Text; version=abc; escaping=zzz", True),
            ("text/plain;version=0.0.4", False),
            ("text/plain;version=abc", False),
            ("*/*", False),
            ("", False),
        ):
            reply = httpx.get(f"{server.url}/metrics", headers={"accept": accept})
            media_type = reply.headers["content-type"].partition(";")[0]
            assert media_type == ("application/openmetrics-text" if openmetrics else "text/plain")
            parse = openmetrics_families if openmetrics else text_string_to_metric_families
            families = {family.name: family for family in parse(reply.text)}
            for name in ("tlt_ready", "vllm:num_requests_running", "sglang:token_usage"):
                assert [sample.name for sample in families[name].samples] == [name]
            assert "\nvllm:time_to_first_token_seconds_bucket{" in reply.text
            assert "\nvllm:generation_tokens_total{" in reply.text
