"""The GRPO example against real servers: the same bits with and without speculation, in one go and
resumed, on one rank and on two, on a fleet of two, of which one may die.
"""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from examples.grpo import corrections
from examples.grpo.compare import main, parsed
from examples.grpo.record import RunDirectory, differences, load_samples
from examples.grpo.train import arguments, train
from tests.e2e.conftest import PAIR
from tests.e2e.fleets import fleet, moves, ready, replica_process
from tests.processes import engine, ranks
from tlt_client import Client
from tlt_server.bench.pad import write
from tlt_server.bench.padding.recipe import pad
from tlt_server.bench.padding.shapes import SHAPES, Shape
from tlt_server.demo.server import ServerProcess
from tlt_server.demo.workload import DRAFTER, TARGET

SIZE = ["--prompts", "2", "--group", "4", "--max-tokens", "48", "--lr", "1e-3"]
TRAINING = ("--drafter-training", "idle", "--drafter-feature-mb", "64")


Run = Callable[..., None]  # flags of a run


def serving(state: Path, *flags: str) -> ServerProcess:
    return ServerProcess(*PAIR, "--state-dir", str(state), "--weight-channels", "http", *flags)


def trained(server: ServerProcess, *flags: object) -> None:
    train(arguments().parse_args([*SIZE, "--url", server.url, *map(str, flags)]))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    with serving(tmp_path_factory.mktemp("state"), "--policy", "off") as server:
        yield partial(trained, server)


@pytest.fixture(scope="module")
def off(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of two steps without speculation."""
    off = tmp_path_factory.mktemp("runs") / "off"
    run("--out", off, "--speculation", "off", "--steps", 2)
    return off


PINNED = ("--strategy", "eagle:7x1x8")


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "steps.jsonl").read_text().splitlines()]


def test_a_run_has_the_same_bits_with_and_without_speculation(
    run: Run, off: Path, tmp_path: Path
) -> None:
    frozen = tmp_path / "frozen"
    pinned = ("--out", frozen, "--speculation", "frozen", *PINNED)
    run(*pinned, "--steps", 1)
    run(*pinned, "--steps", 2, "--resume")
    assert differences(off, frozen) == []
    pair, file = [str(off), str(frozen)], tmp_path / "times.json"
    assert main([*pair, "--from-step", "1", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["figures"]["rows"]
    assert [row["run"] for row in rows] == ["off", "frozen"]
    assert rows[0]["ratio"] == 1 and all(row["steps"] == 1 and row["ratio"] > 0 for row in rows)
    with pytest.raises(ValueError, match="steps from 9 on"):
        main([*pair, "--from-step", "9"])
    plain, drafted = lines(off), lines(frozen)
    assert [line["accept_length"] for line in plain] == [None, None]
    assert all(line["accept_length"] > 2 and len(line["accepted_at_depth"]) > 1 for line in drafted)
    assert all(0 < line["entropy"] < 1 and line["logprob_difference"] < 1e-4 for line in plain)
    assert any(norm > 0 for line in plain for norm in line["gradient_norms"])
    weights = [
        load_file(off / "weights" / step / "model.safetensors") for step in ("00000", "00002")
    ]
    assert moved(*weights) > 1e-4
    samples = load_samples(off, 1)
    assert len(samples) == 8 and {sample.version for sample in samples} == {"off-1"}


@pytest.mark.long
def test_a_run_training_its_drafter_has_the_same_bits(off: Path, tmp_path: Path) -> None:
    adapted, plain = tmp_path / "adapted", ("--speculation", "off", "--steps", 2)
    with serving(tmp_path / "state", *TRAINING) as server, Client(server.url) as client:
        for name in ("one", "another"):  # a round needs samples
            trained(server, "--out", tmp_path / name, *plain)
        learning = ("--speculation", "adaptive", "--drafter-steps", 2, *PINNED)
        trained(server, "--out", adapted, *learning, "--steps", 1)
        assert client.drafter()["trainer"]["state"] == "paused"
        client.resume_drafter_training()
        client.train_drafter()  # so short a run has no round of its own accord
        waiting = ("--speculation", "spot", "--drafter-wait-s", 120, *PINNED)
        trained(server, "--out", adapted, *waiting, "--steps", 2, "--resume")
    assert differences(off, adapted) == []
    adaptive, by_server = lines(adapted)
    assert adaptive["drafter_version"] == "adapted-drafter-0"  # each run begins with its own
    assert by_server["drafter_version"] == "adapted-drafter-1"
    assert all(
        line["drafter_s"] > 0 and line["accept_length"] > 2 for line in (adaptive, by_server)
    )
    assert by_server["trainer"]["rounds"] > 0 and by_server["trainer"]["steps"] > 0


def kill_while_generating(server: ServerProcess, process: int) -> None:
    """Kill a process without which the responses of a step cannot end."""
    with Client(server.url) as client:

        def progress() -> int:
            return sum(one.progress.tokens for one in client.rollouts() if one.status == "running")

        begun_s = time.monotonic()
        while not progress():  # first tokens are told at once, and a response takes 0.2 s
            assert time.monotonic() - begun_s < 240
            time.sleep(0.005)
        os.kill(process, signal.SIGSTOP)
        generating = progress() > 0
        os.kill(process, signal.SIGKILL)
        assert generating, "the step's responses ended too soon"


def trained_over_a_kill(server: ServerProcess, process: int, run: Path) -> None:
    """Train two steps, and kill the process in the second."""
    trained(server, "--out", run, *PINNED, "--steps", 1)
    with ThreadPoolExecutor() as pool:
        killing = pool.submit(kill_while_generating, server, process)
        trained(server, "--out", run, *PINNED, "--steps", 2, "--resume")
        killing.result()


@pytest.mark.long
def test_run_has_the_same_bits_over_two_ranks_with_one_killed(tmp_path: Path) -> None:
    runs = {name: tmp_path / name for name in ("one", "two", "killed")}
    flags = ("--device", "cpu", "--reduction-leaves", "2", "--tensor-parallel")
    with serving(tmp_path / "state-of-one", *flags, "1") as server:
        trained(server, "--out", runs["one"], *PINNED, "--steps", 2)
    with serving(tmp_path / "state-of-two", *flags, "2") as server:
        trained(server, "--out", runs["two"], *PINNED, "--steps", 2)
        [rank] = ranks(engine(server.process.pid))  # the first one waits for it at each step
        trained_over_a_kill(server, rank, runs["killed"])
    assert differences(runs["one"], runs["two"]) == []
    assert differences(runs["one"], runs["killed"]) == []
    assert all(line["accept_length"] > 2 for run in runs.values() for line in lines(run))


@pytest.mark.long
def test_run_has_the_same_bits_on_a_fleet_with_a_replica_killed(off: Path, tmp_path: Path) -> None:
    flags = (*PAIR, "--weight-channels", "http")
    with fleet(tmp_path / "state", *flags) as gateway, Client(gateway.url, timeout_s=60) as client:
        ready(client)
        trained(gateway, "--out", tmp_path / "fleet", *PINNED, "--steps", 2)
        assert moves(client)["lost"] == 0
        replica = replica_process(gateway, "r0")
        trained_over_a_kill(gateway, replica, tmp_path / "killed")
        assert moves(client)["lost"] > 0
        ready(client)
    for run in (tmp_path / "fleet", tmp_path / "killed"):
        assert differences(off, run) == []
        assert all(line["accept_length"] > 2 for line in lines(run))


@pytest.mark.long
def test_small_policy_is_pushed_padded_to_a_larger_shape(tmp_path: Path) -> None:
    shape = replace(SHAPES["mid"], layers=8)
    write(pad(TARGET, DRAFTER, shape, torch.float32), tmp_path / "padded")
    assert Shape.read(tmp_path / "padded") == shape
    flags = [*SIZE, "--padded", str(tmp_path / "padded"), "--out", str(tmp_path / "run")]
    with pytest.raises(ValueError, match="--speculation adaptive"):
        train(arguments().parse_args([*flags, "--speculation", "spot"]))
    flags += ["--speculation", "adaptive", "--drafter-steps", "1", "--steps", "1"]
    train(arguments().parse_args(flags))
    (line,) = map(json.loads, (tmp_path / "run" / "steps.jsonl").read_text().splitlines())
    assert line["logprob_difference"] < 1e-3 and line["accept_length"] > 2
    assert 0 < line["padding_s"] and 0 < line["push_s"] and 0 < line["drafter_push_s"]


def test_arguments_name_runs_to_compare_or_one_to_make(capsys: pytest.CaptureFixture[str]) -> None:
    asked = parsed(["--steps", "5", "--out", "build/grpo"])
    assert (asked.steps, asked.out, asked.runs) == (5, Path("build/grpo"), [])
    assert parsed(["a", "b", "--from-step", "2"]).runs == [Path("a"), Path("b")]
    with pytest.raises(SystemExit):
        parsed([])
    assert "--out" in capsys.readouterr().err


def test_comparing_runs_finds_a_changed_bit(tmp_path: Path) -> None:
    for name, value in (("a", 0.0), ("b", -0.0)):
        (tmp_path / name).mkdir()
        save_file({"x": np.array([value])}, tmp_path / name / "state.safetensors")
    assert differences(tmp_path / "a", tmp_path / "b") == ["state: x"]


def test_run_directory_refuses_steps_of_a_different_run(tmp_path: Path) -> None:
    RunDirectory(tmp_path, {"seed": 1}, resume=False)
    with pytest.raises(ValueError, match="seed=1, not 2"):
        RunDirectory(tmp_path, {"seed": 2}, resume=True)
    (tmp_path / "steps.jsonl").touch()
    with pytest.raises(ValueError, match="--resume"):
        RunDirectory(tmp_path, {"seed": 1}, resume=False)


@pytest.mark.parametrize("correction", ["truncated", "none"])
def test_corrections_change_nothing_where_log_probs_agree(
    run: Run, off: Path, tmp_path: Path, correction: str
) -> None:
    path = tmp_path / correction
    run("--out", path, "--correction", correction, "--speculation", "off", "--steps", 1)
    [corrected] = lines(path)
    assert corrected["gradient_norms"] == pytest.approx(lines(off)[0]["gradient_norms"], rel=1e-3)
    assert corrected["tokens"] == lines(off)[0]["tokens"] and abs(corrected["divergence"]) < 1e-5


@pytest.mark.long
def test_run_on_an_fp8_server_measures_its_divergence(tmp_path: Path) -> None:
    file = tmp_path / "corrections.json"
    flags = ["--steps", "1", "--seeds", "1", "--out", str(tmp_path), "--json", str(file)]
    corrections.main([*SIZE, *flags])
    rows = json.loads(file.read_text())["figures"]["rows"]
    plain, *quantised = [row["mean_difference"] for row in rows]
    assert plain < 1e-5 and len(quantised) == 3 and all(1e-3 < each < 0.1 for each in quantised)


def moved(first: dict[str, Any], second: dict[str, Any]) -> float:
    """Return the largest difference between two policies."""
    return max(float(np.abs(first[name] - second[name]).max()) for name in first)
