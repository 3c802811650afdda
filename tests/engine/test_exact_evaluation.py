"""Recorded responses replayed through drafters: a replay repeats what the CPU engine accepted,
cycle by cycle, and tells when anything is not as it was served.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.engine.gpu_engine import checkpoints, drafting, on_cpu
from tests.engine.pushing import cpu_settings
from tests.engine.test_recorded_sequences import Recording, asked
from tests.engine.tiny import SMALLEST, write_eagle, write_eagle1, write_target
from tlt_server.__main__ import main
from tlt_server.bench.recording import recorded
from tlt_server.bench.replaying.names import parse_policy
from tlt_server.demo.workload import DRAFTER, TARGET, problems_as_requests
from tlt_server.engine.record import traces
from tlt_server.models.config import ModelConfig
from tlt_server.models.decoder import Decoder
from tlt_server.models.loader import load_target
from tlt_server.models.numerics import Numerics
from tlt_server.samples.identity import Identity, identity_of
from tlt_server.samples.sample import sample_set
from tlt_server.samples.samples import Responses, Verifications
from tlt_server.samples.segments import SUFFIX, SegmentHeader, append, header_bytes
from tlt_server.samples.segments import recorded as framed
from tlt_server.samples.tables import read_tables, table_file
from tlt_server.speculation.calibration import Calibration, OnlineTable
from tlt_server.speculation.drafters import find_loader
from tlt_server.speculation.recorded import RolloutRecord
from tlt_server.trainer.replaying.evaluate import FeatureSource, ReplayStage, Task, Walked, evaluate
from tlt_server.trainer.replaying.plans import PinnedPlan, RecordedPlan
from tlt_server.trainer.replaying.replay import DraftReplay, ReplayedDrafter, Roots
from tlt_server.trainer.replaying.self_check import SelfCheck, self_check
from tlt_server.trainer.target.prefill import CpuPrefill
from tlt_server.trainer.target.recompute import RecomputedFeatures
from tlt_server.wire.records import GenerateRequest, Sampling, Strategy

TREE = "fixed:eagle:4x2x6"
RUNS = ("fixed:eagle:1x1x2", "fixed:eagle:2x1x3", "goodput", TREE, "fixed:eagle:7x1x8")


@pytest.fixture(scope="module")
def record() -> Iterator[RolloutRecord]:
    """A rollout of the CPU engine. Its calibration stays as the drafter brings it, so that trees
    can be compared, too.
    """
    sizes = {"threads": 2, "kv_memory_mb": 256, "max_running": 32, "max_model_len": 256}
    settings = cpu_settings(TARGET, DRAFTER, sd_canary=0.0, **sizes)
    problems = problems_as_requests(TARGET, 16, group=2, seed=3, max_tokens=96)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Calibration, "observe", lambda *arguments: None)
        yield recorded(settings, problems, [parse_policy(name) for name in RUNS], [])


@pytest.fixture
def target() -> Decoder:
    return target_of(TARGET, DRAFTER)


def target_of(directory: Path, drafter: Path) -> Decoder:
    layers = find_loader(drafter, "cpu").feature_layers(drafter, ModelConfig.read(directory))
    return load_target(directory, numerics=Numerics(threads=2), feature_layers=layers)


@pytest.fixture
def drafter(target: Decoder) -> ReplayedDrafter:
    return ReplayedDrafter.load(DRAFTER, target)


def checked(
    record: RolloutRecord, drafter: ReplayedDrafter, source: FeatureSource, **given: Any
) -> SelfCheck:
    tables = {"": drafter.weights.calibration.acceptance_K.copy()}
    arguments: dict[str, Any] = {"version": "initial", "tables": tables} | given
    return self_check(record.samples, drafter, ReplayStage(source), **arguments)


def assert_alarm(record: RolloutRecord, drafter: ReplayedDrafter, source: FeatureSource) -> None:
    """Some responses are enough to notice."""
    few_V = record.verified.request_V < 8
    found = checked(replace(record, verified=some(record.verified, few_V)), drafter, source)
    assert found.different > 0 and found.shown == sorted(found.shown)
    first = found.shown[0]
    assert str(first).startswith(f"response {first.response}, root at position")


def test_replay_repeats_the_servers_accepted_counts(
    record: RolloutRecord, target: Decoder, drafter: ReplayedDrafter
) -> None:
    found = checked(record, drafter, RecomputedFeatures(CpuPrefill(target)))
    assert found.compared and not found.different
    assert found.shown == [] and not found.unknown
    assert found.compared > 1000
    verified, strategies = record.verified, record.header.legend.strategies
    trees_V = [strategies[index].width > 1 for index in verified.strategy_V]
    assert sum(trees_V) > 60, "no trees were compared"
    assert (verified.rows_V > verified.own_rows_V).any(), "no branches were there to leave out"


def test_evaluation_detects_a_shifted_pairing(
    record: RolloutRecord, target: Decoder, drafter: ReplayedDrafter
) -> None:
    class Shifted(RecomputedFeatures):
        def features(self, responses: Responses, chosen: Sequence[int]) -> torch.Tensor:
            return super().features(responses, chosen).roll(1, 0)

    assert_alarm(record, drafter, Shifted(CpuPrefill(target)))


def test_evaluation_detects_a_missing_norm(
    record: RolloutRecord, target: Decoder, drafter: ReplayedDrafter
) -> None:
    network = drafter.weights.network
    network.logits = network.head
    assert_alarm(record, drafter, RecomputedFeatures(CpuPrefill(target)))


def test_evaluation_detects_a_stale_vocabulary_map(
    record: RolloutRecord, target: Decoder, drafter: ReplayedDrafter
) -> None:
    network = drafter.weights.network
    network.target_ids = network.target_ids.roll(1)
    assert_alarm(record, drafter, RecomputedFeatures(CpuPrefill(target)))


@pytest.mark.parametrize("role", ["target", "drafter"])
def test_evaluation_detects_a_different_weight_version(
    role: str, record: RolloutRecord, target: Decoder, drafter: ReplayedDrafter
) -> None:
    network = target if role == "target" else drafter.weights.network
    random = torch.Generator().manual_seed(0)
    for tensor in network.parameters().values():
        tensor += 0.03 * tensor.std() * torch.randn(tensor.shape, generator=random)
    assert_alarm(record, drafter, RecomputedFeatures(CpuPrefill(target)))


def test_incomparable_cycles_are_counted_by_reason(
    record: RolloutRecord, target: Decoder, drafter: ReplayedDrafter
) -> None:
    source, drafts = RecomputedFeatures(CpuPrefill(target)), record.header.legend.strategies
    cycles = sum(drafts[index].drafter == "eagle" for index in record.verified.strategy_V)
    other = checked(record, drafter, source, version="other")
    assert other.unknown == {"computed by another version of the target": cycles}
    assert not other.compared
    learnt = checked(record, drafter, source, tables={})
    assert list(learnt.unknown) == ["a tree under a calibration that is not kept"]
    assert learnt.compared + sum(learnt.unknown.values()) == cycles


def test_trees_are_compared_under_their_cycles_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine puts what it learns in force now and then, and names the table of every tree."""
    monkeypatch.setattr(traces, "TURN", 20)
    monkeypatch.setattr(Calibration, "observe", OnlineTable.observe)  # `record` takes it away
    settings = drafting(on_cpu(checkpoints(tmp_path / "pair")), "eagle", 4, 2, 5)
    engine, samples = Recording(settings, tmp_path / "ring"), []
    for turn in range(3):
        engine.run(*asked(turn))
        samples += engine.taken().values()
    found = sample_set(samples, Identity("", ""), engine.info.vocab_size)
    directory = Path(str(settings.drafter))
    target = target_of(Path(settings.model), directory)
    drafter = ReplayedDrafter.load(directory, target)

    def check(tables: dict[str, NDArray[np.float32]]) -> SelfCheck:
        stage = ReplayStage(RecomputedFeatures(CpuPrefill(target)))
        versions = {"version": "initial", "drafter_version": "initial"}
        return self_check(found, drafter, stage, tables=tables, **versions)

    before = drafter.weights.calibration.acceptance_K.copy()
    tables = read_tables(table_file(tmp_path / "ring"))
    known = check(tables)
    assert known.compared and not known.different
    assert not known.unknown and known.compared > 50
    assert len(found.legend.calibrations) > 2 and {*found.legend.calibrations} <= {*tables, ""}
    assert np.array_equal(drafter.weights.calibration.acceptance_K, before)
    oldest = tables.pop(next(iter(tables)))
    assert check(tables).unknown.keys() == {"a tree under a calibration that is not kept"}
    wrong = {version: oldest[::-1].copy() for version in tables}
    assert check(wrong).different > 0, "any table gives these trees"


def test_recorded_walk_visits_the_recorded_roots(
    record: RolloutRecord, target: Decoder, drafter: ReplayedDrafter
) -> None:
    """Responses are left out in which branches were accepted."""
    verified, strategies = record.verified, record.header.legend.strategies
    drafts_V = np.array([each.drafter == "eagle" for each in strategies])[verified.strategy_V]
    mine = some(verified, (record.cycles.run_C[record.cycles.cycle_V] == 0) & drafts_V)
    stage = ReplayStage(RecomputedFeatures(CpuPrefill(target)))
    task, every = Task(drafter, RecordedPlan(strategies, mine, "eagle")), range(16)
    (walked,) = evaluate(record.responses, every, [task], stage)
    plain = [n for n in range(16) if not branched(mine, n)]
    assert len(plain) > 10
    for n in plain:
        of_V, of_C = mine.request_V == n, walked.response_C == n
        assert walked.root_C[of_C].tolist() == mine.root_V[of_V].tolist()
        assert walked.accepted_C[of_C].tolist() == mine.accepted_V[of_V].tolist()


def some(verified: Verifications, which_V: NDArray[np.bool_]) -> Verifications:
    return Verifications(**{name: value[which_V] for name, value in vars(verified).items()})


def branched(verified: Verifications, n: int) -> bool:
    of_V = verified.request_V == n
    return bool((verified.accepted_V[of_V] > verified.own_accepted_V[of_V]).any())


def test_accepted_counts_do_not_depend_on_the_batch(
    record: RolloutRecord, target: Decoder, drafter: ReplayedDrafter
) -> None:
    chosen, strategy = [0, 5, 11, 13], Strategy("eagle", 5, 3, 9)
    stage = ReplayStage(RecomputedFeatures(CpuPrefill(target)))
    (walked,) = evaluate(record.responses, chosen, [Task(drafter, PinnedPlan(strategy))], stage)
    assert_covers(walked, record.responses, chosen)
    for n in chosen:
        of_C = walked.response_C == n
        for root, accepted in zip(walked.root_C[of_C], walked.accepted_C[of_C], strict=True):
            for _, (replay,) in stage.parts(record.responses, [n], [drafter]):
                alone = Roots(np.zeros(1, np.int64), np.array([root]), np.array([9], np.int32))
                assert replay.accepted(alone, 5, 3).tolist() == [accepted]


def test_walk_equals_drafting_from_all_positions_in_advance(
    record: RolloutRecord,
    target: Decoder,
    drafter: ReplayedDrafter,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage, walks = ReplayStage(RecomputedFeatures(CpuPrefill(target))), []
    as_recorded = RecordedPlan(record.header.legend.strategies, record.verified, "eagle")
    plans = (PinnedPlan(Strategy("eagle", 5, 3, 9)), as_recorded)
    for at_once in (False, True):
        monkeypatch.setattr(DraftReplay, "all_at_once", at_once)
        tasks = [Task(drafter, plan) for plan in plans]
        walks.append(evaluate(record.responses, [0, 5, 11, 13], tasks, stage))
    for walked, other in zip(*walks, strict=True):
        assert len(walked) > 20
        for name, found_C in vars(walked).items():
            assert np.array_equal(found_C, getattr(other, name)), name


def test_reused_replay_slot_gives_the_counts_of_a_new_one(
    record: RolloutRecord, target: Decoder, drafter: ReplayedDrafter
) -> None:
    """A response leaves nothing that changes the counts of those that follow."""
    source, plan = RecomputedFeatures(CpuPrefill(target)), PinnedPlan(Strategy("eagle", 5, 3, 9))
    kept = ReplayStage(source)
    for chosen in ([13, 5], [0], [11], [5]):
        walks = [
            evaluate(record.responses, chosen, [Task(drafter, plan)], stage)[0]
            for stage in (kept, ReplayStage(source))
        ]
        for name, found_C in vars(walks[0]).items():
            assert np.array_equal(found_C, getattr(walks[1], name))


def assert_covers(walked: Walked, responses: Responses, chosen: Sequence[int]) -> None:
    """Every token after the first output token comes from one cycle."""
    for n in chosen:
        of_C = walked.response_C == n
        ends_C = walked.root_C[of_C] + walked.emitted_C[of_C]
        assert walked.root_C[of_C][0] == responses.prompt_len_N[n]
        assert ends_C[:-1].tolist() == walked.root_C[of_C][1:].tolist()
        assert ends_C[-1] == len(responses.tokens(n)) - 1


def test_evaluate_command_compares_every_drafter_with_the_first(
    record: RolloutRecord, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record.save(tmp_path / "record.safetensors")
    command = ["drafter", "evaluate", "--record", str(tmp_path / "record.safetensors")]
    command += ["--target", str(TARGET), "--drafter", str(DRAFTER), "--drafter", str(DRAFTER)]
    command += ["--responses", "8", "--threads", "2", "--kind", "countdown=Reach", "--self-check"]
    assert main([*command, "--json", str(tmp_path / "figures.json")]) == 0
    said = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert json.loads((tmp_path / "figures.json").read_text())["figures"] == said
    first, second = said["rows"]
    assert said["self_check"]["different"] == 0 and said["self_check"]["cycles"] > 400
    assert first["accept_length"] == second["accept_length"] > 6
    assert second["against_first"]["cycles_saved"] == [0, 0, 0]
    assert 0 < first["ms_per_token"] < first["ms_per_cycle"] and first["coverage"] > 0.99
    assert main([*command, "--as-recorded", "--policy", TREE]) == 0


def test_drafters_reading_different_layers_share_a_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """EAGLE-1 was in force, and EAGLE-3 is compared with it."""
    base = write_target(tmp_path / "target", shape=SMALLEST)
    first = write_eagle1(tmp_path / "first", base, shape=SMALLEST)
    third = write_eagle(tmp_path / "third", shape=SMALLEST)
    settings = cpu_settings(
        base,
        first,
        dtype="float32",
        attention="cpu",
        threads=2,
        kv_memory_mb=16,
        max_running=4,
        max_model_len=64,
    )
    work = [
        GenerateRequest(
            id=str(n), token_ids=[n + 1, n + 2, 7], sampling=Sampling(max_tokens=40), seed=n
        )
        for n in range(8)
    ]
    made = recorded(settings, work, [parse_policy("fixed:eagle:3x1x4")], [])
    made.save(tmp_path / "record.safetensors")
    command = ["drafter", "evaluate", "--record", str(tmp_path / "record.safetensors")]
    command += ["--target", str(base), "--drafter", str(first), "--drafter", str(third)]
    assert main([*command, "--self-check", "--threads", "2"]) == 0
    said = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert said["self_check"]["different"] == 0 and said["self_check"]["cycles"] > 50
    accept_lengths = [row["accept_length"] for row in said["rows"]]
    assert accept_lengths[0] > 1.2 * accept_lengths[1] > 1.1
    fingerprint: Any = made.header.described["fingerprint"]
    fingerprint["leaves"] = 2
    made.save(tmp_path / "record.safetensors")
    assert main([*command[:-4], "--drafter", str(third), "--self-check"]) == 1
    told = " ".join(capsys.readouterr().out.split())
    assert "recorded with 2 reduction leaves, which round otherwise than this replay with 1" in told


def test_segments_of_a_server_are_replayed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Segments hold the verifications of a running engine, and are refused for another target."""
    settings = replace(
        drafting(on_cpu(checkpoints(tmp_path / "pair")), "eagle", 4, 1, 5), max_running=3
    )
    engine = Recording(settings, tmp_path / "ring")
    engine.run(*asked(0))
    target = Path(settings.model)
    header = SegmentHeader.of(identity_of(target), engine.info.vocab_size)
    file = tmp_path / "kept" / f"1{SUFFIX}"
    file.parent.mkdir()
    append(file, header_bytes(header))
    for number, sample in enumerate(engine.taken().values()):
        append(file, framed(number, sample)[1])
    command = ["drafter", "evaluate", "--record", str(file.parent), "--target", str(target)]
    command += ["--drafter", settings.drafter, "--threads", "2", "--self-check", "--device", "cpu"]
    assert main(command) == 0
    said = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert said["self_check"]["different"] == 0 and said["self_check"]["cycles"] > 20
    assert said["responses"] == 5 and said["rows"][0]["ms_per_token"] is None
    assert main([*command, "--as-recorded"]) == 0
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"vocab_size": 63}))
    assert main(command) == 2
    assert "vocab_size 64, here 63" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--version", "step-7"], "it has initial|versions initial; version 'step-7'"),
        (["--as-recorded", "--policy", "beg"], "no cycle of this drafter under 'beg'"),
        (["--drafter", "/nowhere"], "/nowhere/config.json"),
    ],
)
def test_unusable_evaluations_are_refused(
    flags: list[str],
    says: str,
    record: RolloutRecord,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    record.save(tmp_path / "record.safetensors")
    command = ["drafter", "evaluate", "--record", str(tmp_path / "record.safetensors")]
    command += ["--target", str(TARGET), "--drafter", str(DRAFTER), "--responses", "1"]
    assert main([*command, *flags]) == 2
    assert re.search(says, capsys.readouterr().err)
