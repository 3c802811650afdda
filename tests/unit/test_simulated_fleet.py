"""The simulated fleet: its clock, its replicas' tokens and times, and what placing brings."""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.test_placing import asked
from tlt_server.bench import fleet
from tlt_server.bench.arguments import BENCHES
from tlt_server.bench.fleets.clock import simulate
from tlt_server.bench.fleets.machine import FleetHistory, Machine
from tlt_server.bench.fleets.policies import SPREAD, long_tailed, policies
from tlt_server.bench.fleets.replica import (
    CONTEXT_S,
    GAINS,
    STEP_MS,
    SimulatedReplica,
    token_seconds,
    tokens_of,
)
from tlt_server.bench.fleets.wire import Wire
from tlt_server.frontend.link.launching import ReplicaAddress
from tlt_server.frontend.link.members import Member
from tlt_server.frontend.link.remote import SILENT_PINGS, RemoteLink
from tlt_server.metrics import Metrics
from tlt_server.wire.events import Outputs
from tlt_server.wire.link import PING_S, Attach
from tlt_server.wire.records import GenerateRequest, StepOutput

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def test_virtual_minutes_take_no_time() -> None:
    async def wait() -> list[float]:
        moments = []
        for _ in range(3):
            await asyncio.sleep(600)
            moments.append(time.monotonic())
        return moments

    began_s = time.monotonic()
    assert simulate(wait()) == [600.0, 1200.0, 1800.0]
    assert time.monotonic() - began_s < 600


def test_simulation_that_waits_for_nothing_fails() -> None:
    async def wait() -> None:
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="nothing is left to happen"):
        simulate(wait())


def test_step_times_are_those_of_the_results() -> None:
    decode = json.loads((RESULTS / "decode-gpu.json").read_text())["figures"]["rows"]
    strict = {(r["batch"], r["context"] > 10_000): r for r in decode if r["numerics"] == "strict"}
    assert {batch: strict[batch, False]["step_ms"] for batch in STEP_MS} == pytest.approx(
        STEP_MS, rel=0.001
    )
    long, short = strict[1, True], strict[1, False]
    further = (long["step_ms"] - short["step_ms"]) / (long["context"] - short["context"])
    assert pytest.approx(further / 1e3, rel=0.01) == CONTEXT_S
    sweep = json.loads((RESULTS / "rollout-http-sweep-gpu.json").read_text())["figures"]["rows"]
    gains = {int(r["workload"][5:]): r["against_off"] for r in sweep if r["arm"] == "goodput"}
    assert gains == pytest.approx(GAINS, rel=0.001)


def run_alone(
    requests: list[GenerateRequest], length: int, abort_at_s: float | None = None
) -> tuple[list[StepOutput], float]:
    async def run() -> tuple[list[StepOutput], float]:
        found: list[StepOutput] = []
        ended = asyncio.Event()

        def emit(event: Outputs) -> None:
            found.extend(event.outputs)
            if not (replica.running or replica.waiting):
                ended.set()

        replica = SimulatedReplica(emit, lambda request: length, 2)
        replica.submit(requests)
        if abort_at_s is not None:
            await asyncio.sleep(abort_at_s)
            replica.abort([request.id for request in requests])
        await ended.wait()
        return found, time.monotonic()

    return simulate(run())


@pytest.mark.parametrize("turns", range(4))
def test_link_that_is_cancelled_while_it_fails_ends(turns: int) -> None:
    async def run() -> bool:
        machine = Machine("r0", FleetHistory(), lambda request: 1, Metrics())
        fleet: Any = SimpleNamespace(died=lambda *how: None, take=lambda *how: None)
        member = Member(ReplicaAddress("r0", "r0:1"))
        link = RemoteLink("r0:1", lambda: Attach(fleet="f", epoch=1), fleet, member)
        link.__dict__["_channel"] = lambda: Wire(machine)
        running = asyncio.create_task(link.run())
        await asyncio.sleep(0.5 * PING_S)
        machine.hold(60.0)
        await asyncio.sleep((0.5 + SILENT_PINGS) * PING_S)  # the turn of its last ping
        for _ in range(turns):
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.sleep(1.0)
        return running.done()

    assert simulate(run())


def given(outputs: list[StepOutput], id: str) -> list[int]:
    return [token for output in outputs if output.id == id for token in output.token_ids]


def test_simulated_tokens_are_those_of_their_seeds() -> None:
    outputs, seconds = run_alone([asked(f"{i}") for i in range(3)], 700)
    for i in range(3):
        assert given(outputs, f"{i}") == tokens_of(0, 0, 700)
    assert [each.finish_reason for each in outputs].count("stop") == 3
    shortest_s = 700 * (token_seconds(1, 0) + token_seconds(2, 0))
    assert shortest_s < seconds < 1.2 * shortest_s


def test_simulated_abort_loses_no_token() -> None:
    first, _ = run_alone([asked("a"), asked("b"), asked("c")], 900, abort_at_s=0.7)
    assert [each.finish_reason for each in first].count("abort") == 3
    before = given(first, "a")
    assert 0 < len(before) < 900 and not given(first, "c")
    request = asked("a")
    rest = GenerateRequest(
        id="a", token_ids=[1], sampling=request.sampling, seed=0, generated=before
    )
    second, _ = run_alone([rest], 900)
    assert before + given(second, "a") == tokens_of(0, 0, 900)


@pytest.mark.slow  # simulates four rollouts
def test_spreading_beats_hashing_and_moves_beat_it() -> None:
    found = {name: run() for name, run in policies(long_tailed(128, 3), 4, (0.1,)).items()}
    seconds = {name: figures.seconds for name, figures in found.items()}
    assert seconds[SPREAD] < 0.95 * min(seconds["hash"], seconds["groups kept together"])
    assert seconds["with moves"] < seconds[SPREAD] and found["with moves"].moves
    assert found["with consolidation 0.1"].free >= found["with moves"].free
    assert len({figures.tokens for figures in found.values()}) == 1


def test_bench_prints_a_row_for_each_policy(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    BENCHES["fleet"].add("fleet", parser)
    asked_for = ["--replicas", "2", "--requests", "16", "--seeds", "1", "--longest", "500"]
    assert fleet.run(parser.parse_args(asked_for)) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert {row["policy"] for row in rows} >= {"hash", SPREAD, "with moves"}
    assert all(row["seconds"] > 0 for row in rows)
