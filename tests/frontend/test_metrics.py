"""Metrics: what they count, that their labels are bounded, and what an engine step costs them."""

import ast
import asyncio
import os
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
import msgspec
from prometheus_client.parser import text_string_to_metric_families

import tlt_server
from tests.frontend.fake_engine import INFO
from tests.frontend.live_server import LiveServer, live_server, serving
from tests.waiting import in_loop, until
from tlt_client import Client, ItemResult
from tlt_client.channels.errors import ChannelLost, ContentRefused, PlaceForbidden
from tlt_server import errors
from tlt_server.frontend.http.slices import watch_turns
from tlt_server.metrics import Metrics
from tlt_server.metrics.steps import POSITIONS, STRATEGIES
from tlt_server.wire.events import Outputs, WeightReport, WeightState
from tlt_server.wire.records import OFF, Cycle, StepContext, Strategy, Switch
from tlt_server.wire.training import Judged, SpotReport, TrainerState

EAGLE, CHAIN = Strategy("eagle", 7, 4, 16), Strategy("eagle", 7, 1, 8)


def cycle(strategy: Strategy, accepted: Sequence[int], drafted: int = 0) -> Cycle:
    return Cycle(
        context=StepContext(len(accepted), 0, 10.0, 0),
        strategy=strategy,
        rows=1,
        accepted=tuple(accepted),
        drafted=drafted,
        step_s=0.01,
    )


def step(
    metrics: Metrics, strategy: Strategy, accepted: Sequence[int], drafted: int = 0, **gauges: float
) -> None:
    metrics.engine.took(Outputs([], gauges, cycle(strategy, accepted, drafted)))


def series(text: str) -> dict[str, dict[tuple[str, ...], float]]:
    """Sample name -> label values, in the order of their names -> value."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
    return found


def shown(metrics: Metrics) -> dict[str, dict[tuple[str, ...], float]]:
    return series(metrics.exposition().text.decode())


def test_accepted_drafts_are_counted_by_strategy_and_position() -> None:
    metrics = Metrics()
    step(metrics, OFF, [0, 0, 0])
    step(metrics, EAGLE, [0, 2, 5, 2], drafted=60)
    step(metrics, EAGLE, [1, 0], drafted=30)
    step(metrics, EAGLE, [], drafted=0)
    found, name = shown(metrics), EAGLE.shape
    assert found["tlt_cycles_total"] == {("off",): 1, (name,): 3}
    assert found["tlt_decodes_total"] == {("off",): 3, (name,): 6}
    assert found["tlt_sd_drafted_tokens_total"] == {("off",): 0, (name,): 90}
    assert found["tlt_sd_accepted_tokens_total"] == {("off",): 0, (name,): 10}
    assert found["tlt_sd_accepted_position_total"] == {
        (str(k), name): sum(a >= k for a in [0, 2, 5, 2, 1, 0]) for k in range(1, 6)
    }
    assert found["tlt_accept_length"] == {("off",): 1.0, (name,): 1.5}


def test_deep_drafts_count_at_every_listed_position() -> None:
    metrics = Metrics()
    step(metrics, EAGLE, [POSITIONS + 9, POSITIONS, 3], drafted=99)
    found = shown(metrics)
    positions = [
        found["tlt_sd_accepted_position_total"][str(k), EAGLE.shape]
        for k in range(1, POSITIONS + 1)
    ]
    assert positions == [3, 3, 3] + [2] * (POSITIONS - 3)
    assert found["tlt_sd_accepted_tokens_total"][EAGLE.shape,] == 2 * POSITIONS + 12


def test_active_strategy_and_its_switches_are_shown() -> None:
    metrics = Metrics()
    for strategy in (OFF, OFF, EAGLE, OFF):
        step(metrics, strategy, [0])
    found = shown(metrics)
    assert found["tlt_strategy_in_force"] == {("off",): 1, (EAGLE.shape,): 0}
    assert found["tlt_steps_total"] == {("off",): 3, ("eagle tree",): 1}


def test_strategy_switches_are_counted_by_reason() -> None:
    metrics = Metrics()
    switches = [Switch(0.0, "off", "", reason, 1) for reason in ("start", "pin", "pin")]
    metrics.engine.took(Outputs([], {}, None, switches))
    found = {by[0]: n for by, n in shown(metrics)["tlt_strategy_switches_total"].items() if n}
    assert found == {"start": 1, "pin": 2}


def test_predicted_and_measured_times_cover_the_same_steps() -> None:
    metrics = Metrics()
    for strategy, predicted_s in ((OFF, 0.25), (OFF, 0.0), (CHAIN, 0.5)):
        done = msgspec.structs.replace(cycle(strategy, [0]), step_s=1.0, predicted_s=predicted_s)
        metrics.engine.took(Outputs([], {}, done))
    found = shown(metrics)
    assert found["tlt_predicted_step_seconds_total"] == {("off",): 0.25, ("eagle chain",): 0.5}
    assert found["tlt_measured_step_seconds_total"] == {("off",): 1, ("eagle chain",): 1}


def test_varying_rows_of_a_step_make_no_new_strategy_label() -> None:
    metrics = Metrics()
    for rows in range(2, STRATEGIES + 40):
        step(metrics, Strategy("eagle", 7, 1, rows), [1], drafted=1)
    found = shown(metrics)
    assert found["tlt_cycles_total"] == {("eagle:7x1",): STRATEGIES + 38}
    assert found["tlt_step_rows_count"] == {(): STRATEGIES + 38}


def test_excess_strategies_share_one_label_value() -> None:
    metrics = Metrics()
    for depth in range(2, STRATEGIES + 40):
        step(metrics, Strategy("eagle", depth, 1, 2), [1], drafted=1)
    assert len(shown(metrics)["tlt_cycles_total"]) == STRATEGIES + 1
    assert shown(metrics)["tlt_cycles_total"]["other",] == 38


def test_totals_keep_growing_after_an_engine_restart() -> None:
    metrics = Metrics()
    for total in (2.0, 5.0, 1.0):
        step(metrics, OFF, [0], preemptions=total, running=7.0, odd=3.0)
    found = shown(metrics)
    assert found["tlt_preemptions_total"] == {(): 6} and found["tlt_running_sequences"] == {(): 7}
    assert found["tlt_engine_figure"] == {("odd",): 3}
    step(metrics, OFF, [0], preemptions=1.0)
    assert "tlt_engine_figure" not in shown(metrics), "of a policy that is no longer in force"


def test_drafter_lag_grows_with_every_change_of_the_target() -> None:
    metrics = Metrics()
    metrics.engine_ready(msgspec.structs.replace(INFO, drafter_version="d0"))
    behind = []
    for target, drafter in (
        ("v1", "d0"),
        ("v2", "d0"),
        ("v2", "d0"),
        ("v2", "d1"),
        ("v3", "d2"),
        ("v4", "d2"),
    ):
        metrics.weights.reported(
            WeightReport(
                id="w",
                state=WeightState(target=target, drafter=drafter),
                result="committed",
                role="target",
            )
        )
        behind.append(shown(metrics)["tlt_drafter_behind_commits"][()])
    assert behind == [1, 2, 2, 0, 0, 1]


def test_process_memory_and_disk_space_are_shown(tmp_path: Path) -> None:
    metrics = Metrics()
    assert "tlt_engine_process_resident_memory_bytes" not in shown(metrics)
    assert shown(metrics)["process_resident_memory_bytes"][()] > 1e6
    pids = [os.getppid(), os.getpid()]
    metrics.engine_ready(msgspec.structs.replace(INFO, pid=pids[0], rank_pids=[pids[1], 2**22 + 1]))
    metrics.disk.watch(tmp_path / "not" / "made")
    found = shown(metrics)
    assert found["tlt_engine_process_resident_memory_bytes"].keys() == {("0",), ("1",)}
    assert found["tlt_engine_process_resident_memory_bytes"]["0",] > 1e5
    assert found["tlt_engine_process_cpu_seconds_total"].keys() == {("0",), ("1",)}
    assert 0 < found["tlt_disk_free_bytes"][()] <= found["tlt_disk_total_bytes"][()]


own = serving(scope="function", engine={"step_s": 0.004})


def scraped(server: LiveServer) -> dict[str, dict[tuple[str, ...], float]]:
    return series(httpx.get(f"{server.url}/metrics").text)


def test_token_latencies_are_measured(own: LiveServer) -> None:
    with Client(own.url) as client:
        client.generate(
            [{"prompt": "abc", "n": 2}], sampling={"max_tokens": 30}
        )  # 10 outputs of 3 tokens each
    found = scraped(own)
    assert (
        found["tlt_queue_seconds_count"][()]
        == found["tlt_time_to_first_token_seconds_count"][()]
        == 2
    )
    assert found["tlt_inter_token_seconds_count"][()] == 18
    mean = found["tlt_inter_token_seconds_sum"][()] / 18
    assert 0.004 / 3 * 0.9 < mean < 1, (
        "an output of 3 tokens every 4 ms, or later on a busy machine"
    )
    assert found["tlt_generated_tokens_total"][()] == 60


def test_tokens_of_a_replaced_version_are_stale(model: Path) -> None:
    with (
        live_server(model, engine={"step_s": 0.02, "per_step": 1}) as own,
        Client(own.url) as client,
        Client(own.url) as trainer,
    ):
        client.generate([{"prompt": "abc"}], sampling={"max_tokens": 5})
        assert scraped(own)["tlt_stale_tokens_total"][()] == 0
        events = client.stream([{"prompt": "abc"}], sampling={"max_tokens": 200})
        next(events)
        trainer.update_weights("p", "v1")
        (result,) = [event for event in events if isinstance(event, ItemResult)]
        old, new = result.choices[0].weight_versions
        assert (old.version, new.version) == ("v0", "v1")
        assert scraped(own)["tlt_stale_tokens_total"][()] == old.end


def test_requests_are_counted_by_route_method_and_status(own: LiveServer) -> None:
    for path in ("/livez", "/livez", "/nowhere/1", "/nowhere/2", "/weights/rollback"):
        httpx.get(f"{own.url}{path}")
    httpx.request("PURGE", f"{own.url}/livez")
    httpx.post(f"{own.url}/generate", content=b"{")
    expected = {
        ("GET", "/livez", "200"): 2,
        ("GET", "none", "404"): 2,
        ("GET", "/weights/rollback", "405"): 1,
        ("other", "/livez", "405"): 1,
        ("POST", "/generate", "400"): 1,
    }
    until(lambda: scraped(own)["tlt_http_requests_total"].items() >= expected.items())
    found = scraped(own)
    counted = {
        key: value
        for key, value in found["tlt_http_requests_total"].items()
        if key[1] != "/metrics"
    }
    assert counted == expected
    assert found["tlt_http_request_seconds_count"]["none",] == 2
    refused = {reason: count for (reason,), count in found["tlt_requests_rejected_total"].items()}
    assert {reason: count for reason, count in refused.items() if count} == {
        "not_found": 2,
        "method_not_allowed": 1,
        "invalid_request": 1,
    }
    assert refused["queue_full"] == 0, (
        "a series that appears with its first refusal hides that one from `increase`"
    )


def test_every_result_of_a_weight_command_has_a_series_at_start() -> None:
    package = Path(tlt_server.__file__).parent
    raised, results = set[str](), set[str]()
    pushing = {*(package / "weights").glob("*.py"), *(package / "engine" / "pushes").glob("*.py")}
    pushing -= {package / "weights" / "dormant.py"}  # metrics of a sleep
    for file in (*pushing, package / "models" / "loader.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                error = getattr(errors, node.func.id, None)
                raised |= {error.code} if isinstance(error, type) else set()
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in ("report", "answer")
            ):
                results |= {
                    argument.value for argument in node.args if isinstance(argument, ast.Constant)
                }
    assert {"conflict", "push_failed"} < raised and {"committed", "rolled_back"} < results
    raised |= {error.code for error in (ContentRefused, PlaceForbidden, ChannelLost)}
    raised -= {"startup", "unavailable"}  # what a sequence ends with while weights are quarantined
    results -= {"joined", "left"}
    assert raised | results - {"looked"} == {
        result for result, _ in shown(Metrics())["tlt_weight_pushes_total"]
    }


def test_the_ready_metric_agrees_with_readyz(model: Path) -> None:
    with live_server(model) as server:
        assert scraped(server)["tlt_ready"] == {(): 1}
        server.call(lambda: setattr(server.client, "draining", True))
        assert httpx.get(f"{server.url}/readyz").status_code == 503
        assert scraped(server)["tlt_ready"] == {(): 0}
        assert (
            httpx.post(f"{server.url}/generate", json={"requests": [{"prompt": "a"}]}).status_code
            == 503
        )
        refused = scraped(server)["tlt_requests_rejected_total"]
        assert refused["unavailable",] == 1, "a probe is no request refused"


def test_an_engine_step_costs_the_frontend_little() -> None:
    """A step of 64 decoding requests with every gauge of the real engine takes little of the
    processor's time.
    """
    metrics = Metrics()
    gauges = dict.fromkeys(
        (
            "running",
            "waiting",
            "pages_free",
            "pages_cached",
            "preemptions",
            "spanning",
            *map(str, range(14)),
        ),
        1.0,
    )
    message = Outputs([], gauges, cycle(EAGLE, [i % 8 for i in range(64)], drafted=960))
    best = float("inf")
    for _ in range(20):
        started_s = time.thread_time()
        for _ in range(20):
            metrics.engine.took(message)
        best = min(best, (time.thread_time() - started_s) / 20)
    assert best < 0.0005, f"{best * 1e6:.0f} us per step"


@in_loop
async def test_long_turn_of_the_event_loop_is_measured() -> None:
    metrics = Metrics()
    watching = asyncio.create_task(watch_turns(metrics))
    await asyncio.sleep(0.02)
    asyncio.get_running_loop().call_soon(time.sleep, 0.06)
    await asyncio.sleep(0.02)
    watching.cancel()
    value = metrics.registry.get_sample_value
    assert 0.05 < (value("tlt_loop_held_longest_seconds") or 0) < 10
    total, below = (
        value("tlt_loop_held_seconds_bucket", {"le": le}) or 0.0 for le in ("+Inf", "0.05")
    )
    assert total > below


def test_drafter_training_metrics_are_shown() -> None:
    metrics = Metrics()
    judged = Judged(
        candidate=1,
        target_version="v1",
        drafter_version="d1",
        outcome="no_gain",
        gain=-0.01,
        gain_low=-0.03,
        gain_high=0.02,
        accept_length=4.5,
        accept_length_before=4.6,
        ms_per_token=1.5,
        ms_per_token_before=1.25,
        accepted_at_depth=[0.9, 0.5],
    )
    first = SpotReport(
        state=TrainerState.TRAINING,
        steps=24,
        rounds=2,
        tokens=1000,
        recomputed_tokens=300,
        loss=0.75,
        loss_at_depth=[0.5, 1.0],
        candidate=judged,
        adopted=1,
        refused={"no_gain": 2},
        different_cycles=3,
        parking_ms=[4.0],
        memory_bytes=2**30,
        checkpoint_stall_ms=12.5,
    )
    metrics.training.took(first)
    more = {"tokens": 1600, "recomputed_tokens": 400, "parking_ms": [40.0], "adopted": 2}
    metrics.training.took(msgspec.structs.replace(first, **more))
    found = shown(metrics)
    assert found["tlt_trainer_tokens_total"] == {("captured",): 1200, ("recomputed",): 400}
    assert found["tlt_trainer_state"][("training",)] == 1
    assert sum(found["tlt_trainer_state"].values()) == 1
    assert found["tlt_trainer_loss_at_depth"] == {("1",): 0.5, ("2",): 1.0}
    assert found["tlt_trainer_accept_length"] == {("candidate",): 4.5, ("in_force",): 4.6}
    assert found["tlt_trainer_token_seconds"] == {("candidate",): 0.0015, ("in_force",): 0.00125}
    assert found["tlt_trainer_candidate_accepted_share"] == {("1",): 0.9, ("2",): 0.5}
    bounds = {("gain",): -0.01, ("gain_low",): -0.03, ("gain_high",): 0.02}
    assert found["tlt_trainer_candidate_gain"] == bounds
    assert found["tlt_drafter_candidates_refused_total"] == {("no_gain",): 2}
    for name, value in (
        ("trainer_steps", 24),
        ("trainer_rounds", 2),
        ("trainer_loss", 0.75),
        ("trainer_checkpoint_stall_seconds", 0.0125),
        ("trainer_memory_bytes", 2**30),
        ("drafter_adoptions_total", 2),
        ("drafter_self_check_differences_total", 3),
        ("trainer_parking_seconds_count", 2),
    ):
        assert found[f"tlt_{name}"][()] == value, name
    metrics.training.took(SpotReport(tokens=10))  # a new process counts from 0
    assert shown(metrics)["tlt_trainer_tokens_total"] == {("captured",): 1210, ("recomputed",): 400}
