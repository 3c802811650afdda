"""A drafter in FP8: the same tokens, checksums and exports, and drafts that a replay repeats."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.pushing import Pushable, cpu_settings, why
from tests.engine.test_exact_evaluation import RUNS, checked, target_of
from tests.engine.test_recorded_sequences import Recording, asked
from tests.engine.test_resumed_training import new_work
from tests.engine.weight_cases import request, root, settings
from tlt_client.quantise import quantise
from tlt_server.__main__ import main
from tlt_server.bench.recording import recorded
from tlt_server.bench.replaying.names import parse_policy
from tlt_server.demo.workload import DRAFTER, TARGET, problems_as_requests
from tlt_server.engine.settings import EngineSettings
from tlt_server.errors import ModelError
from tlt_server.speculation.calibration import Calibration
from tlt_server.speculation.recorded import RolloutRecord
from tlt_server.trainer.process.trial import Trial
from tlt_server.trainer.process.work import DrafterWork
from tlt_server.trainer.recording.state_store import StateStore
from tlt_server.trainer.replaying.evaluate import ReplayStage, Task, evaluate
from tlt_server.trainer.replaying.handed import Handed, digest_of
from tlt_server.trainer.replaying.plans import PinnedPlan
from tlt_server.trainer.replaying.replay import ReplayedDrafter
from tlt_server.trainer.target.prefill import CpuPrefill
from tlt_server.trainer.target.recompute import RecomputedFeatures
from tlt_server.wire.commands import HandOver
from tlt_server.wire.records import Strategy
from tlt_server.wire.training import HandedOver

__all__ = ["root", "settings"]  # fixtures


@pytest.fixture(scope="module")
def in_fp8(settings: EngineSettings) -> EngineSettings:
    how = Strategy("eagle", 4, 3, 9).name
    return replace(settings, drafter_quantization="fp8", policy="fixed", sd_strategy=how)


def generated(engine: Pushable) -> list[object]:
    asked = [request(i) for i in range(3)]
    engine.submit(*asked)
    engine.finish()
    return [(engine.tokens(r.id), engine.logprobs(r.id)) for r in asked]


def handed_over(engine: Pushable, work: DrafterWork, place: Path) -> Handed:
    id = f"out-{place.name}"
    engine.engine.send(HandOver(id, str(place), engine.settings.drafter))
    state = engine.report(id).state
    work.install(
        HandedOver(
            directory=str(place),
            target=state.target,
            drafter=state.drafter,
            quantization=state.drafter_quantization,
            longest=2**20,
        )
    )
    assert work._handed is not None
    return work._handed


def test_drafter_in_fp8_changes_no_bit(in_fp8: EngineSettings, root: Path) -> None:
    engine, plain = Pushable(in_fp8), Pushable(replace(in_fp8, drafter_quantization="none"))
    assert generated(engine) == generated(plain)
    assert engine.checksums() == plain.checksums(), "of what was loaded"
    for each in (engine, plain):
        assert each.push(root / "new-drafter", "d1", role="drafter").result == "committed"
    assert engine.checksums() == plain.checksums(), "of what was pushed"
    assert engine.roll_back().result == "rolled_back"
    assert engine.info.drafter_quantization == "fp8"


def test_checksums_tell_of_damaged_fp8_values(in_fp8: EngineSettings) -> None:
    engine = Pushable(in_fp8)
    before, live = engine.checksums(), engine.engine.pushes.transaction.versions.live
    assert live.drafter is not None
    live.drafter.network.head.weight_KX[3, 5] += 1
    after = engine.checksums()
    assert {name for name in before if before[name] != after[name]} == {"draft.lm_head.weight"}


def rollout(count: int, **stored: str) -> RolloutRecord:
    sizes = {"threads": 2, "kv_memory_mb": 256, "max_running": 32, "max_model_len": 256}
    how = cpu_settings(TARGET, DRAFTER, sd_canary=0.0, **sizes, **stored)
    problems = problems_as_requests(TARGET, count, group=2, seed=3, max_tokens=96)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Calibration, "observe", lambda *arguments: None)
        return recorded(how, problems, [parse_policy(name) for name in RUNS[-2:]], [])


@pytest.fixture(scope="module")
def record() -> RolloutRecord:
    return rollout(8, drafter_quantization="fp8")


def test_only_a_replay_in_fp8_repeats_the_counts(record: RolloutRecord) -> None:
    target = target_of(TARGET, DRAFTER)
    source = RecomputedFeatures(CpuPrefill(target))
    drafter = ReplayedDrafter.load(DRAFTER, target, quantization="fp8")
    found = checked(record, drafter, source)
    assert found.compared > 100 and not found.different
    assert checked(record, ReplayedDrafter.load(DRAFTER, target), source).different


@pytest.mark.parametrize("target", ["none", "fp8"])
def test_evaluation_replays_in_the_recorded_form(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = rollout(2, quantization=target, drafter_quantization="fp8")
    record.save(tmp_path / "record.safetensors")
    command = ["drafter", "evaluate", "--record", str(tmp_path / "record.safetensors")]
    command += ["--target", str(TARGET), "--drafter", str(DRAFTER), "--device", "cpu"]
    command.append("--self-check")
    assert main(command) == 0
    assert main([*command, "--drafter-quantization", "none"]) == 1
    capsys.readouterr()


def test_restart_with_another_form_keeps_a_pushed_drafter(
    in_fp8: EngineSettings, root: Path, tmp_path: Path
) -> None:
    kept = replace(in_fp8, state_dir=tmp_path)
    engine = Pushable(kept)
    assert engine.push(root / "new-drafter", "d1", role="drafter").result == "committed"
    sums = engine.checksums()
    for how in ("none", "fp8"):
        again = Pushable(replace(kept, drafter_quantization=how))
        assert not again.info.lost and again.info.drafter_version == "d1"
        assert again.info.drafter_quantization == how and again.checksums() == sums


def test_drafter_in_e4m3_is_refused_by_name(
    in_fp8: EngineSettings, root: Path, tmp_path: Path
) -> None:
    engine, directory = Pushable(in_fp8), root / "e4m3-drafter"
    before = engine.checksums()
    shutil.copytree(root / "new-drafter", directory)
    tensors = load_file(directory / "model.safetensors")
    blocks = quantise(tensors["lm_head.weight"])
    tensors["lm_head.weight"] = blocks.values_NK
    save_file(tensors, directory / "model.safetensors")
    report = engine.push(directory, "d1", role="drafter")
    assert report.result in ("model", "weights_refused") and "'lm_head.weight'" in why(report)
    tensors["lm_head.weight_scale_inv"] = blocks.scales_BC
    save_file(tensors, directory / "model.safetensors")
    report = engine.push(directory, "d2", role="drafter")
    assert report.result in ("model", "weights_refused") and "lm_head.weight" in why(report)
    assert engine.checksums() == before
    config = json.loads((directory / "config.json").read_text())
    form = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": form}))
    with pytest.raises(ModelError, match="drafters are read in bfloat16"):
        Pushable(replace(in_fp8, drafter=str(directory)))


def test_trainer_gets_what_was_pushed_and_replays_in_fp8(
    in_fp8: EngineSettings, root: Path, tmp_path: Path
) -> None:
    engine, work = Pushable(in_fp8), new_work(in_fp8, tmp_path)
    assert engine.push(root / "new-drafter", "d1", role="drafter").result == "committed"
    handed = handed_over(engine, work, tmp_path / "handed")
    pushed, got = (
        load_file(place / "model.safetensors") for place in (root / "new-drafter", handed.directory)
    )
    assert all(torch.equal(pushed[name], got[name]) for name in pushed), "an export is this"
    assert handed.quantization == "fp8" and handed.drafter_key == "d1@fp8"
    candidate = handed.replayed(root / "new-drafter")
    assert candidate.weights.network.quantization == "fp8"
    assert digest_of(candidate) == digest_of(handed.in_force)


def test_records_and_knowledge_name_the_form(in_fp8: EngineSettings, tmp_path: Path) -> None:
    engine = Recording(in_fp8, tmp_path / "ring")
    engine.run(*asked(0))
    drafted = {each.calibration for sample in engine.taken().values() for each in sample.drafted}
    assert any(name.startswith("initial@fp8#") for name in drafted)
    assert drafted <= {name for name in drafted if name.startswith("initial@fp8")} | {""}
    assert engine.engine.choice.knowledge.weights.drafter.endswith("@fp8")


def test_form_is_judged_on_the_prompts_of_a_trial(record: RolloutRecord, tmp_path: Path) -> None:
    target, samples = target_of(TARGET, DRAFTER), record.samples
    source, drafter = RecomputedFeatures(CpuPrefill(target)), ReplayedDrafter.load(DRAFTER, target)
    embedding_VH = target.embedding_VH
    handed = Handed("initial", "initial", embedding_VH, embedding_VH, target, DRAFTER, drafter)
    trial = Trial(handed, tmp_path, 1, 0, StateStore(0, 0), target.vocab_size, None, {})
    trial._source = source
    task = Task(drafter, PinnedPlan(trial._strategy))
    walked = evaluate(samples.responses, range(len(samples)), [task], ReplayStage(source))
    trial._judged, trial._walked = [samples], [walked * 2]
    judging = trial.judge_form()
    with pytest.raises(StopIteration) as ended:
        while True:
            next(judging)
    test = ended.value.value
    (replay,) = trial._stage._replays.values()
    assert replay.drafter.weights.network.quantization == "fp8"
    assert abs(test.lost.value) < 0.1 and not test.passed, "a few prompts are too few"


class WithoutFp8(Handed):
    """A drafter with a width that is no multiple of 128, on a GPU."""

    def replayed(self, *given: object) -> ReplayedDrafter:
        raise ModelError("FP8 on a GPU needs a multiple of 128")


def test_drafter_that_cannot_be_in_fp8_ends_no_round(tmp_path: Path) -> None:
    target = target_of(TARGET, DRAFTER)
    drafter, embedding_VH = ReplayedDrafter.load(DRAFTER, target), target.embedding_VH
    handed = WithoutFp8("initial", "initial", embedding_VH, embedding_VH, target, DRAFTER, drafter)
    trial = Trial(handed, tmp_path, 1, 0, StateStore(0, 0), target.vocab_size, None, {})
    with pytest.raises(StopIteration) as ended:
        next(trial.judge_form())
    assert not ended.value.value.passed
