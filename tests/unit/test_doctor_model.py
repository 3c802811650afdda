"""The checks of `tlt doctor` that read checkpoints: each finds the fault that is planted for it."""

from __future__ import annotations

import json
import re
import shutil
from bisect import bisect_left
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.tiny import Shape, write_eagle1
from tests.unit.test_doctor import CARD, MIB, ROOT, configured, expect, fails, found, warns
from tlt_server.config import Config
from tlt_server.demo.workload import DRAFTER, TARGET
from tlt_server.doctor import model, places
from tlt_server.doctor.checks import Finding
from tlt_server.engine.devices.training import OtherGpu
from tlt_server.engine.gpu.start import planning
from tlt_server.models.numerics import BLOCKS, Numerics, WeightSlice
from tlt_server.process import machine


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    """A copy of the shipped pair to break."""
    shutil.copytree(TARGET, tmp_path / "target")
    shutil.copytree(DRAFTER, tmp_path / "drafter")
    return tmp_path


def broken(pair: Path, **settings: Any) -> Config:
    return configured(model=pair / "target", drafter=str(pair / "drafter"), **settings)


def test_doctor_checks_the_ranks(pair: Path) -> None:
    assert "on each of 2 ranks" in found(model.memory, broken(pair, tensor_parallel=2)).found
    refused = found(model.device, broken(pair, tensor_parallel=4))
    expect(refused, "fail", "tensor_parallel is 4", "use 1 or 2")
    for numbers in ({"tensor_parallel": 3}, {"tensor_parallel": 8}):
        assert found(model.device, broken(pair, **numbers)).remedy == "use 1 or 2"
    few = found(model.device, broken(pair, tensor_parallel=2, reduction_leaves=1))
    assert few.remedy == "use 2", "four and eight would cut a head"


def test_doctor_refuses_ranks_with_a_drafter_using_the_head(pair: Path, tmp_path: Path) -> None:
    shape = Shape(hidden=256, head_dim=128, mlp=512, vocab=512)
    write_eagle1(tmp_path / "eagle1", pair / "target", shape=shape)
    for ranks, status in ((1, "ok"), (2, "fail")):
        given = {"drafter": str(tmp_path / "eagle1"), "tensor_parallel": ranks}
        said = found(model.drafter, configured(model=pair / "target", **given))
        assert said.status == status
    assert said.remedy == "use an EAGLE-3 drafter, or tensor_parallel 1"


@pytest.mark.parametrize(
    "given, remedy",
    [
        ({"weight_staging": "host", "weight_root": "/tmp"}, "use auto, device or none"),
        ({"drafter_parallel": "shared"}, "leave the setting out"),
    ],
)
def test_single_rank_settings_on_several_ranks_have_a_remedy(
    pair: Path, given: dict[str, str], remedy: str
) -> None:
    assert found(model.device, broken(pair, tensor_parallel=2, **given)).remedy == remedy


def test_doctor_checks_ranks_on_gpus(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    twin = OtherGpu(1, CARD.name, CARD.total_bytes)
    monkeypatch.setattr(model, "look", lambda: CARD._replace(others=(twin,)))
    one, shared = (
        found(model.memory, configured(drafter="none", tensor_parallel=ranks)).found
        for ranks in (1, 2)
    )
    assert "0.25 GiB of grammars in the host's memory" in one
    assert "on each of 2 GPUs" in shared and "GPUs" not in one
    assert re.search(r"of weights, \d+ MiB for exchanges", shared) and "exchange" not in one
    assert "each GPU has 0.79 of that throughput" in shared and "throughput" not in one
    page = (ROOT / "docs" / "several_gpus.md").read_text().replace("\n", " ")
    assert f"{model.STEP_ON_TWO} of its time on two H200s at batch 1 and 256" in page
    for batch in (1, 256):
        share = step_ms("decode-tp2-gpu", batch) / step_ms("decode-gpu", batch)
        assert abs(share - model.STEP_ON_TWO) < 0.02, f"measured {share:.3f} at batch {batch}"
    weights = re.compile(r"(\d+) MiB of weights")
    alone, part = (int(weights.match(said)[1]) for said in (one, shared))  # type: ignore[index]
    assert part < 0.7 * alone
    assert found(model.device, broken(pair, tensor_parallel=2)).status == "ok"
    uneven = broken(pair, tensor_parallel=2, reduction_leaves=8)
    fails(model.device, uneven, "reduction_leaves is 8", "use 2")


def step_ms(record: str, batch: int) -> float:
    figures = json.loads((ROOT / "benchmarks" / "results" / f"{record}.json").read_text())
    [found] = [
        row["step_ms"]
        for row in figures["figures"]["rows"]
        if (row["batch"], row["prompt"], row["numerics"]) == (batch, 128, "strict")
    ]
    return float(found)


@pytest.mark.slow
def test_fitting_width_is_offered_for_a_small_gpu(
    pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def memory(free: int, ranks: int) -> Finding:
        twin = OtherGpu(1, CARD.name, CARD.total_bytes)
        card = CARD._replace(free_bytes=free, others=(twin,))
        monkeypatch.setattr(model, "look", lambda: card)
        return found(model.memory, broken(pair, weight_root=pair, tensor_parallel=ranks))

    def least() -> int:
        sizes = range(0, CARD.free_bytes, MIB)
        return bisect_left(sizes, True, key=lambda free: memory(free, 2).status == "ok") * MIB

    fits_two = least()
    assert memory(fits_two, 2).status == "ok"
    short = memory(fits_two, 1)
    expect(short, "fail", "for pushed weights", "set tensor_parallel to 2, on 2 GPUs")
    assert "throughput" not in memory(fits_two, 2).found, "one GPU is too small"
    shorter = memory(fits_two - MIB, 2)
    expect(shorter, "fail", "max_model_len")
    assert "weight_staging" not in shorter.remedy and "tensor_parallel" not in shorter.remedy
    lacking = memory(11 * MIB, 1)
    expect(lacking, "fail", "of weights", "end what else uses this GPU")
    assert "tensor_parallel" not in lacking.remedy, "no width leaves room for graphs"
    [exchange] = re.findall(r"(\d+) MiB for exchanges", memory(fits_two, 2).found)
    monkeypatch.setattr(planning, "exchange_bytes", lambda settings, *_: 0)
    assert abs(fits_two - least() - int(exchange) * MIB) <= MIB


def test_doctor_checks_the_tokenizer(pair: Path) -> None:
    (pair / "target" / "tokenizer_config.json").write_text("{}")
    warns(places.tokenizer, broken(pair), "no chat template", "chat_template")
    (pair / "target" / "tokenizer.json").write_text("{")
    fails(places.tokenizer, broken(pair), "tokenizer.json")
    (pair / "target" / "tokenizer.json").unlink()
    warns(places.tokenizer, broken(pair), "there is no", "save the tokenizer")


def rewrite(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_doctor_checks_the_model(pair: Path) -> None:
    weights, config = pair / "target" / "model.safetensors", pair / "target" / "config.json"
    whole, described = weights.read_bytes(), config.read_text()
    assert found(model.target, broken(pair)).status == "ok"
    weights.write_bytes(whole[:-100])
    fails(model.target, broken(pair), "not a whole safetensors file", "download it again")
    weights.unlink()
    fails(model.target, broken(pair), "model.safetensors", "is missing", "point to a directory")
    weights.write_bytes(whole)
    rewrite(config, intermediate_size=32)
    fails(model.target, broken(pair), "has shape", "do not belong together")
    config.write_text(described)
    rewrite(config, num_hidden_layers=99)
    fails(model.target, broken(pair), "is missing", "incomplete")
    config.write_text(described)
    rewrite(config, architectures=["MambaForCausalLM"])
    fails(model.target, broken(pair), "unknown model family 'MambaForCausalLM'")
    rewrite(config, architectures=["LlamaForCausalLMEagle3"])
    fails(model.target, broken(pair), "holds a drafter", "give it as --drafter")


def test_unsupported_dtype_is_refused(pair: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = pair / "target" / "model.safetensors"
    tensors = load_file(path)
    save_file(
        {**tensors, "model.norm.weight": tensors["model.norm.weight"].to(torch.float64)}, path
    )
    fails(model.target, broken(pair), "torch.float64", "convert the checkpoint")


def test_length_beyond_the_model_is_refused() -> None:
    fails(
        model.target, configured(max_model_len=10**6), "max_model_len 1000000 exceeds", "lower it"
    )


def test_doctor_checks_the_drafter(pair: Path) -> None:
    config = pair / "drafter" / "config.json"
    described = config.read_text()
    assert found(model.drafter, broken(pair)).status == "ok"
    assert found(model.drafter, configured(drafter="history")).found == "history"
    rewrite(config, hidden_size=1024)
    fails(model.drafter, broken(pair), "'hidden_size' is 1024", "trained for this target")
    config.write_text(described)
    rewrite(config, intermediate_size=32)
    fails(model.drafter, broken(pair), "has shape")
    config.write_text(described)
    (pair / "drafter" / "model.safetensors").write_bytes(b"short")
    fails(model.drafter, broken(pair), "truncated or damaged", "download it again")


@pytest.mark.parametrize("ranks", [1, 2])
def test_doctor_tests_numerics_on_the_matmuls_of_a_rank(ranks: int) -> None:
    slices = set()

    def look(self: Numerics, cut: WeightSlice) -> bool:
        slices.add(tuple(cut.weight_KN.shape))
        return True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Numerics, "_slice_invariant", look)
        said = found(model.numerics, configured(tensor_parallel=ranks)).found
    assert "self-test passed on 5 shapes" in said
    assert slices == ({(256, 384), (256, 512), (256, 256)} if ranks == 2 else set())


def test_doctor_checks_the_numerics(monkeypatch: pytest.MonkeyPatch) -> None:
    warns(model.numerics, configured(numerics="fast"), "exact in distribution", "--numerics strict")
    monkeypatch.setattr(
        "tlt_server.models.numerics.Numerics._row_invariant",
        lambda self, weight, bias: self.method is BLOCKS,
    )
    warns(model.numerics, configured(), "padded blocks of 16 rows", "oneDNN")
    monkeypatch.setattr(
        "tlt_server.models.numerics.Numerics._row_invariant", lambda self, weight, bias: False
    )
    fails(model.numerics, configured(), "depends on the rows around it", "MKL_CBWR=AVX2,STRICT")


@pytest.mark.parametrize(
    ("available", "total", "status"), [(100, 200, "fail"), (100, 8000, "warn"), (8000, 16000, "ok")]
)
def test_doctor_checks_the_memory(
    available: int, total: int, status: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "meminfo").write_text(
        f"MemTotal: {total * 1024} kB\nMemAvailable: {available * 1024} kB\n"
    )
    monkeypatch.setattr(machine, "MEMORY", tmp_path / "meminfo")
    monkeypatch.setattr(machine, "CONTROL_GROUP", tmp_path)
    finding = found(model.memory, configured(weight_root=tmp_path))
    assert finding.status == status and "3 x 0.02 GiB" in finding.found
    assert "0.25 GiB of grammars" in finding.found
    for name, value in {
        "max": f"{300 * 2**20}",
        "current": "0",
        "stat": "anon 0\ninactive_file 0",
    }.items():
        (tmp_path / f"memory.{name}").write_text(f"{value}\n")
    fails(model.memory, configured(weight_root=tmp_path), "in all", "--kv-memory-mb")


def test_doctor_counts_the_memory_of_drafter_training() -> None:
    given = {"model": TARGET, "drafter": str(DRAFTER), "drafter_training": "idle"}
    without = found(model.memory, configured(**given))
    assert "to train the drafter" not in without.found  # nothing is trained without features
    given["drafter_feature_mb"] = 64
    assert re.search(r"1\.\d\d GiB to train the", found(model.memory, configured(**given)).found)
    fails(
        model.memory,
        configured(**given, drafter_training_mb=1),
        "drafter_training_mb 1 is too little",
        "set drafter_training_mb to",
    )


def test_trainer_memory_is_counted_on_the_device_that_trains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    twin = OtherGpu(1, CARD.name, CARD.total_bytes)
    monkeypatch.setattr(model, "look", lambda: CARD._replace(others=(twin,), mps=True))
    given = {"model": TARGET, "drafter": str(DRAFTER), "drafter_feature_mb": 64}
    idle, share, apart = (
        found(model.memory, configured(**given, drafter_training=mode)).found
        for mode in ("idle", "share", "device")
    )
    assert idle == share and "to train the drafter" in idle and "MiB of the GPU and" in idle
    assert "to train the drafter" not in apart and "MiB of cuda:1 and" in apart
    monkeypatch.setattr(
        model, "look", lambda: CARD._replace(others=(twin._replace(total_bytes=1),))
    )
    fails(
        model.memory,
        configured(**given, drafter_training="device"),
        "of cuda:1, which has 0",
        "leave drafter_training off",
    )
    fails(
        model.device,
        configured(**given, drafter_training="share"),
        "MPS is not on",
        "use drafter_training idle",
    )


def test_doctor_refuses_kv_memory_below_one_sequence() -> None:
    fails(model.memory, configured(kv_memory_mb=1), "kv_memory_mb 1 holds", "raise it to")


def test_doctor_checks_the_committed_weights(tmp_path: Path) -> None:
    config = configured(state_dir=tmp_path)
    assert found(model.committed_weights, config).status == "ok" and not list(tmp_path.iterdir())
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "current.json").write_text(
        json.dumps({"model": "/another", "roles": {}})
    )
    fails(model.committed_weights, config, "belongs to the model /another", "another --state-dir")


CLEAR = re.compile(r"(\d+) pages")


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "look", lambda: CARD)


def test_doctor_checks_the_device(monkeypatch: pytest.MonkeyPatch, card: None) -> None:
    description = found(model.device, configured()).found
    assert description.startswith("cuda, bfloat16, attention triton, up to 256 sequences")
    assert "torch sees Card 9000" in description
    fails(
        model.device, configured(attention="flash_attn"), "numerics is strict", "attention triton"
    )
    assert (
        found(model.device, configured(device="cpu")).found
        == "cpu, float32, attention cpu, up to 64 sequences"
    )
    fails(
        model.device,
        configured(attention="tirton"),
        "attention is 'tirton', which no device has",
        "use auto, triton",
    )
    on_cpu = configured(device="cpu", attention="flash_attn")
    fails(model.device, on_cpu, "needs a GPU (device cuda)", "use auto, cpu or torch")
    monkeypatch.setattr(model, "look", lambda: CARD._replace(unusable="torch finds no GPU"))
    assert "device cpu: torch finds no GPU" in found(model.device, configured()).found
    fails(model.device, configured(device="cuda"), "torch finds no GPU", "--device cpu")
    assert found(model.target, configured(device="cuda")).status == "ok", (
        "a checkpoint is read all the same"
    )
    for check in (model.memory, model.numerics):
        for wrong in ({"device": "cuda"}, {"attention": "foo"}):
            fails(
                check,
                configured(**wrong),
                "not checked, as nothing is chosen that would compute",
                "the check device",
            )


def test_doctor_reports_how_much_a_gpu_holds(card: None, tmp_path: Path) -> None:
    finding = found(model.memory, configured(max_model_len=4096))
    assert (
        finding.status == "ok"
        and "of weights" in finding.found
        and int(CLEAR.search(finding.found)[1]) == 256 * 256
    )  # type: ignore[index]
    less = found(model.memory, configured(max_model_len=4096, memory_fraction=0.16))
    assert less.status == "ok" and int(CLEAR.search(less.found)[1]) < 256 * 256  # type: ignore[index]
    assert "for pushed weights" in found(model.memory, configured(weight_root=tmp_path)).found
    fails(
        model.memory,
        configured(memory_fraction=0.13),
        "for one sequence of max_model_len",
        "raise memory_fraction to 0.",
    )
    assert "not here" in found(model.numerics, configured()).found


def test_doctor_reports_bytes_of_a_version(card: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "memory_speed", lambda: 2e12)
    plain = found(model.memory, configured(drafter="none")).found
    quantised = found(model.memory, configured(drafter="none", quantization="fp8")).found
    both = re.search(r"target has (\d+) MiB, (\d+) MiB with --quantization fp8; pushed", plain)
    assert both is not None and int(both[1]) > 1.6 * int(both[2])
    assert f"target has {both[2]} MiB; pushed" in quantised
    assert "a step takes at least 0.00 ms" in quantised
    assert "at 2.0 TB/s" in quantised
    assert re.search(r"pushed versions on the GPU would leave \d+ pages of KV", plain)
    assert "FP8 weights" in found(model.device, configured(quantization="fp8")).found


def test_doctor_reports_models_unsupported_on_a_gpu(pair: Path, card: None) -> None:
    assert (
        found(model.target, broken(pair)).status
        == found(model.drafter, broken(pair)).status
        == "ok"
    )
    target, head = pair / "target" / "config.json", pair / "drafter" / "config.json"
    rewrite(head, mlp_bias=True)
    fails(model.drafter, broken(pair), "'mlp_bias' true", "--device cpu")
    rewrite(target, head_dim=48)
    fails(model.target, broken(pair), "'head_dim' 48", "--device cpu")
    fails(model.target, broken(pair, device="cpu"), "has shape")
    rewrite(target, architectures=["LlamaForCausalLM"], attention_bias=True)
    fails(model.target, broken(pair), "'attention_bias' true", "--device cpu")
