"""Recorded rollouts: a replay under another policy predicts what the engine then does, which drafts
it accepts included, on a CPU and one step late on a GPU.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from tests.engine.fast_interpreter import patched_once
from tests.engine.gpu_engine import checkpoints, request
from tests.engine.pushing import cpu_settings
from tlt_server.bench.recording import recorded
from tlt_server.bench.replay import figures, run
from tlt_server.bench.replaying.names import parse_policy
from tlt_server.bench.replaying.plots import draw
from tlt_server.bench.replaying.simulated import Replay
from tlt_server.demo.workload import DRAFTER, TARGET, problems_as_requests
from tlt_server.engine.settings import EngineSettings
from tlt_server.errors import StartupError
from tlt_server.speculation.cost import KNOTS, CostRecord
from tlt_server.speculation.recorded import DraftedTrees, RolloutRecord

CHAIN, SHORT, TREE = "fixed:eagle:7x1x8", "fixed:eagle:3x1x3", "fixed:eagle:4x2x6"
RUNS = ("off", CHAIN, SHORT, TREE)
GPU_RUNS = ("off", "fixed:eagle:4x1x5", "fixed:eagle:3x2x4")


@pytest.fixture(scope="module")
def record() -> RolloutRecord:
    settings = cpu_settings(
        TARGET,
        DRAFTER,
        dtype="float32",
        attention="cpu",
        threads=2,
        max_running=3,
        max_model_len=256,
    )
    return recorded(
        settings,
        problems_as_requests(TARGET, 5, group=2, seed=3, max_tokens=40),
        [parse_policy(name) for name in RUNS],
        [DraftedTrees("eagle", 10, 1), DraftedTrees("eagle", 4, 2)],
    )


@pytest.fixture(scope="module")
def gpu_record(tmp_path_factory: pytest.TempPathFactory) -> RolloutRecord:
    """A record of the GPU engine, on the interpreter, as `save` and `load` keep it."""
    root = tmp_path_factory.mktemp("gpu")
    settings = checkpoints(root)
    with patched_once():
        record = recorded(
            replace(settings, model=Path(settings.model)),
            [request(i, 4 + i, max_tokens=9 - i, ignore_eos=False) for i in range(3)],
            [parse_policy(name) for name in GPU_RUNS],
            [DraftedTrees("eagle", 4, 1), DraftedTrees("eagle", 3, 2)],
        )
    record.save(root / "record.safetensors")
    return RolloutRecord.load(root / "record.safetensors")


@pytest.mark.parametrize("run", range(len(RUNS)), ids=RUNS)
def test_replay_accepts_the_drafts_the_engine_accepted(record: RolloutRecord, run: int) -> None:
    assert_predicted(record, run, RUNS[run])


@pytest.mark.long
@pytest.mark.parametrize("run", range(len(GPU_RUNS)), ids=GPU_RUNS)
def test_replay_accepts_the_drafts_the_gpu_engine_accepted(
    gpu_record: RolloutRecord, run: int
) -> None:
    assert_predicted(gpu_record, run, GPU_RUNS[run])


@pytest.mark.long
def test_every_position_of_a_gpu_record_has_its_tree(gpu_record: RolloutRecord) -> None:
    responses = gpu_record.responses
    assert gpu_record.verified.accepted_V.sum() > 5
    last_P = np.zeros(int(responses.output_len_N.sum()), bool)
    last_P[responses.position_N + responses.output_len_N - 1] = True
    first_P = np.zeros_like(last_P)
    first_P[responses.position_N] = True  # follows the prompt, which the target reads undrafted
    for trees in gpu_record.trees.values():
        assert ((trees.count_P > 0) == ~(first_P | last_P)).all()


def test_no_policy_beats_the_best_choice_in_hindsight(record: RolloutRecord) -> None:
    best = figures(Replay(record, None).run())
    assert best["regret"] < 1e-9
    for name in ("off", "beg", "goodput"):
        found = figures(Replay(record, parse_policy(name)).run())
        assert found["tokens_per_s"] * found["seconds"] == pytest.approx(
            best["tokens_per_s"] * best["seconds"], rel=1e-3
        )
        assert 0 < found["regret"] < 1 and 0 <= found["expected_regret"] < 1
    assert found["calibration_error"]["eagle"] < 0.3


@pytest.mark.long
def test_cuda_record_is_judged_without_a_gpu(gpu_record: RolloutRecord) -> None:
    """Steps are padded to the sizes of captured graphs."""
    header = msgspec.structs.replace(gpu_record.header, device="cuda")
    replayed = Replay(replace(gpu_record, header=header), parse_policy(GPU_RUNS[1])).run()
    assert replayed.tokens == gpu_record.responses.output_len_N.sum()
    assert 0 <= figures(replayed)["regret"] < 1
    padded = {each.cycle.rows for each in replayed.cycles if each.cycle.context.prefill_rows}
    assert padded == {64}


def test_plots_are_png_files(record: RolloutRecord, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = {CHAIN: Replay(record, parse_policy(CHAIN), judged=False).run()}
    files = draw(found, tmp_path / "plots")
    assert [file.name for file in files] == ["rollout-fixed-eagle-7x1x8.png"]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        ("fixed:other:7x1x8", "the record has eagle, history"),
        ("fixed:eagle:7x3x8", "trees of 1, 2: record it with --width 3"),
        ("fixed:eagle:5x2x8", "trees of 4 levels"),
    ],
)
def test_strategies_beyond_the_record_are_refused(
    policy: str, says: str, record: RolloutRecord, tmp_path: Path
) -> None:
    record.save(tmp_path / "record.safetensors")
    given = argparse.Namespace(
        file=tmp_path / "record.safetensors", policy=[parse_policy(policy)], plots=None, rounds=1
    )
    with pytest.raises(StartupError, match=says):
        run(given)


def test_record_refuses_a_policy_of_an_unloaded_drafter() -> None:
    settings = EngineSettings(model=TARGET, drafter=str(DRAFTER))
    with pytest.raises(StartupError, match="fixed:other:7x1x8 needs the drafter 'other'"):
        recorded(settings, [], [parse_policy("fixed:other:7x1x8")], [])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"__metadata__", b"__metadatas_"),
        (b'\\"device\\":\\"cpu\\"', b'\\"device\\":\\"tpu\\"'),
        (b'[\\"eagle\\",', b'[\\"other\\",'),
        (b'\\"versions\\":[\\"initial\\"]', b'\\"versions\\":[           ]'),
        (b'\\"described\\":{', b'\\"described\\":\xff'),
    ],
)
def test_damaged_replay_record_is_refused_by_name(
    old: bytes, new: bytes, record: RolloutRecord, tmp_path: Path
) -> None:
    file = tmp_path / "record.safetensors"
    record.save(file)
    data = file.read_bytes()
    assert old in data and len(old) == len(new)
    file.write_bytes(data.replace(old, new, 1))
    with pytest.raises(StartupError, match=r"record\.safetensors .* record the rollout again"):
        RolloutRecord.load(file)


@pytest.mark.parametrize(
    "change",
    [
        {"pages": 1},
        {"pages": 2**28},
        {"max_running": 2**28},
        {"max_model_len": 2**40},
        {"max_draft_rows": 2**40},
        {"cost": CostRecord([1.0], {}, {}, [0.0] * 3)},
        {"cost": CostRecord([-1.0] * len(KNOTS), {}, {}, [0.0] * 3)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_record_with_impossible_sizes_or_times_is_refused(
    change: dict[str, object], record: RolloutRecord, tmp_path: Path
) -> None:
    file = tmp_path / "record.safetensors"
    replace(record, header=msgspec.structs.replace(record.header, **change)).save(file)
    with pytest.raises(StartupError, match=r"record\.safetensors .* record the rollout again"):
        RolloutRecord.load(file)


def test_record_with_misfit_arrays_is_refused(record: RolloutRecord, tmp_path: Path) -> None:
    file = tmp_path / "record.safetensors"
    trees = record.trees["eagle-1"]
    none = replace(trees, own_PD=np.zeros_like(trees.own_PD))  # nodes of trees that have none
    replace(record, trees={**record.trees, "eagle-1": none}).save(file)
    with pytest.raises(StartupError, match="eagle-1 does not fit the rest"):
        RolloutRecord.load(file)
    record.save(file)
    file.write_bytes(file.read_bytes().replace(b'"dtype":"U16"', b'"dtype":"F16"', 1))
    with pytest.raises(StartupError, match="is float16, not uint16"):
        RolloutRecord.load(file)


def test_record_with_unknown_dtypes_is_refused(record: RolloutRecord, tmp_path: Path) -> None:
    file = tmp_path / "record.safetensors"
    record.save(file)
    data = file.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = data[8:end].replace(b'"dtype":"U16"', b'"dtype":"BF16"', 1)
    file.write_bytes(len(header).to_bytes(8, "little") + header + data[end:])
    with pytest.raises(StartupError, match="is not a safetensors file .*BF16"):
        RolloutRecord.load(file)


def assert_predicted(record: RolloutRecord, turn: int, name: str) -> None:
    """Compare a run of the engine with the replay of its policy."""
    cycles, verified = record.cycles, record.verified
    of_run_V = cycles.run_C[cycles.cycle_V] == turn
    seen = zip(verified.request_V, verified.root_V, verified.accepted_V, strict=True)
    expected = [tuple(map(int, v)) for v, mine in zip(seen, of_run_V, strict=True) if mine]
    replayed = Replay(record, parse_policy(name), judged=False).run()
    assert [v for cycle in replayed.cycles for v in cycle.verified] == expected
    rows = cycles.rows_C[cycles.run_C == turn]
    assert [cycle.cycle.rows for cycle in replayed.cycles] == rows.tolist()
    assert replayed.tokens == record.responses.output_len_N.sum()
