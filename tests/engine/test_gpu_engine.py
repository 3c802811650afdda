"""The GPU engine on the interpreter: plain decoding equals the CPU engine's, and speculation
changes no bit of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import msgspec
import pytest

from tests.engine.fast_interpreter import patched_once
from tests.engine.gpu_engine import (
    PAGE,
    assert_agree,
    bits,
    checkpoints,
    drafting,
    on_cpu,
    prompt,
    request,
)
from tests.engine.pushing import Pushable
from tlt_server.engine.assembly import assemble
from tlt_server.engine.gpu.drafts import drift
from tlt_server.engine.settings import EngineSettings
from tlt_server.records import DraftLimits, GenerateRequest
from tlt_server.speculation.survival import OnlineTable


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineSettings]:
    with patched_once():
        yield checkpoints(tmp_path_factory.mktemp("smallest"))


FEW, OF_HISTORY = DraftLimits(max_depth=2, max_rows=2), DraftLimits(drafter="history")


def mixed() -> list[GenerateRequest]:
    """One of each kind of device sampling; `r5` finds a page of `r4`, which is gone by then."""
    first = prompt(4, PAGE + 2)
    return [
        msgspec.structs.replace(request(0, 3, max_tokens=8), sd=FEW),
        msgspec.structs.replace(request(1, 9, temperature=0.0), sd=OF_HISTORY),
        request(2, 6, temperature=0.6, ignore_eos=False, stop_token_ids=list(range(0, 60, 3))),
        request(3, 5, temperature=0.8, top_k=12, top_p=0.9),
        msgspec.structs.replace(request(4, max_tokens=3), token_ids=first),
        msgspec.structs.replace(request(5, max_tokens=5), token_ids=[*first, 7]),
        msgspec.structs.replace(request(6, 4, temperature=0.7, min_p=0.02), sd=False),
    ]


IDS = [r.id for r in mixed()]


@pytest.fixture(scope="module")
def cpu(settings: EngineSettings) -> Pushable:
    engine = Pushable(on_cpu(settings))
    engine.run(*mixed())
    return engine


@pytest.fixture(scope="module")
def plain(settings: EngineSettings) -> Pushable:
    engine = Pushable(replace(settings, max_rows=12))  # prompts are read in pieces
    engine.run(*mixed())
    return engine


def test_tokens_equal_the_cpu_engines(plain: Pushable, cpu: Pushable) -> None:
    assert_agree(plain, cpu, IDS)
    assert plain.said["r2"][-1].finish_reason == "stop", "a stop id must have been met"
    assert plain.said["r5"][0].cached_tokens == PAGE


def test_it_says_which_kernel_computes_matmuls(
    settings: EngineSettings, plain: Pushable, cpu: Pushable
) -> None:
    why = "portable: the type is float32, and the streaming kernel is for bfloat16"
    assert plain.info.products == why and cpu.info.products == ""
    said = {}
    assemble(settings, on_phase=lambda name, seconds, detail: said.update({name: detail}))
    assert said["prepare runner"].split("; ")[1] == f"matmuls {why}"


def test_all_pages_are_free_again_and_nothing_is_in_flight(plain: Pushable) -> None:
    gauges = plain.engine.gauges()
    assert (
        gauges["pages_free"] == plain.info.pages
        and gauges["running"] == 0
        and plain.engine.runner.in_flight == 0
    )


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(("eagle", 2, 2, 4), id="tree"),
        pytest.param(("eagle", 3, 1, 4), id="chain", marks=pytest.mark.long),
        pytest.param(("history", 3, 2, 4), id="history", marks=pytest.mark.long),
    ],
)
def test_speculation_changes_no_bit(
    strategy: tuple[str, int, int, int],
    settings: EngineSettings,
    plain: Pushable,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(drift, "EVERY", 1)
    engine = Pushable(drafting(settings, *strategy))
    passes = accepted = drafted = 0
    engine.submit(*mixed())
    while not engine.engine.idle:
        engine.step()
        if cycle := engine.engine.last_cycle:
            passes, accepted, drafted = (
                passes + 1,
                accepted + sum(cycle.accepted),
                drafted + cycle.drafted,
            )
    assert bits(engine, IDS) == bits(plain, IDS)
    said = [output for id in IDS for output in engine.said[id]]
    assert sum(output.drafted for output in said) == drafted > 0
    assert sum(output.accepted for output in said) == accepted <= drafted
    assert accepted > 0 or strategy[0] == "history", (
        "the drafter shares the noise: some of its tokens must hit"
    )
    assert all(output.drafted == 0 for output in engine.said["r6"]), "it is never speculated on"
    assert max(output.drafted for output in engine.said["r0"]) <= 1, "it takes one draft row"
    if strategy[0] != "history":
        assert sum(output.drafted for output in engine.said["r0"]) > 0
        assert not any(output.drafted for output in engine.said["r1"]), "another drafter's step"
    gauges = engine.engine.gauges()
    assert gauges["pages_free"] == engine.info.pages
    table = engine.engine.runner.passes.drafters[strategy[0]].calibration
    online = OnlineTable(table.prior_Z.numpy())
    online.survival_K, online.trials_K = table.survival_Z.numpy(), table.trials_Z.numpy()
    assert gauges[
        "calibration_drift" if strategy[0] == "eagle" else "history_table_drift"
    ] == pytest.approx(online.drift)
    assert online.drift > 0 or strategy[0] == "history"


def test_preemption_changes_no_bit(settings: EngineSettings) -> None:
    """Two sequences of two pages each, on three."""
    asked = [request(i, PAGE - 1 - i, max_tokens=6) for i in range(2)]
    wide, scarce = (
        Pushable(settings),
        Pushable(replace(drafting(settings, "eagle", 3, 1, 4), pages=3)),
    )
    wide.run(*asked)
    scarce.run(*asked)
    assert bits(scarce, ["r0", "r1"]) == bits(wide, ["r0", "r1"])
    assert scarce.engine.gauges()["preemptions"] > 0 and scarce.engine.gauges()["pages_free"] == 3
