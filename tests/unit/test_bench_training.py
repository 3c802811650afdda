"""`tlt bench training` at a tiny shape; states that its targets compute again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.sections.training import training
from tlt_server.__main__ import main
from tlt_server.bench.training import feature_rows, random_target
from tlt_server.demo.workload import TARGET as DEMO
from tlt_server.models import Forward
from tlt_server.models.config import ModelConfig, Rope
from tlt_server.models.draft_networks import NETWORKS
from tlt_server.trainer.learning.objectives import OBJECTIVES
from tlt_server.trainer.learning.pack import DocumentPart, Placed, assemble, fit, windows
from tlt_server.trainer.target import gpu_prefill
from tlt_server.trainer.target.gpu_prefill import GpuPrefill
from tlt_server.trainer.target.prefill import CpuPrefill

TARGET = ModelConfig(
    architecture="Qwen2ForCausalLM",
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    layers=2,
    heads=2,
    kv_heads=1,
    head_dim=16,
    max_position=64,
    norm_eps=1e-6,
    rope=Rope(),
    tied_embeddings=False,
    attention_bias=False,
    mlp_bias=False,
    eos_token_ids=(),
)
TEXTS = [np.arange(length, dtype=np.int32) % 61 for length in (5, 19, 3)]


class States:
    """States of texts as a `DocumentSource`."""

    def __init__(self, found: Forward) -> None:
        self.lengths: Sequence[int] = [len(text) for text in TEXTS]
        self._features, self._hidden = (
            x.split(list(self.lengths)) for x in (found.features_RF, found.hidden_RH)
        )

    def read(self, document: int, start: int, stop: int) -> DocumentPart:
        own = slice(start, stop)
        tokens_T = torch.from_numpy(TEXTS[document].astype(np.int64))[own]
        states = self._features[document][own], self._hidden[document][own]
        return DocumentPart(tokens_T, *states, torch.ones(len(tokens_T), dtype=torch.bool))


@pytest.mark.parametrize("wide", [False, True])
def test_recomputed_states_fill_the_slots_of_the_packer(wide: bool) -> None:
    found = random_target(TARGET, (0, 1, 1), torch.device("cpu")).states(TEXTS)
    source = States(found)
    pieces = [w for i, n in enumerate(source.lengths) for w in windows(i, n, 40, 2)]
    placed = [Placed(window, 20) for window in pieces] if wide else fit(pieces, 40)[0]
    assert len(placed) == 3
    pack = assemble(source, placed, 99)
    before_N = feature_rows(placed, 99)
    read_N = torch.cat(
        [at + torch.arange(w.slots) for (w, _), at in zip(placed, pack.bounds, strict=False)]
    )
    assert torch.equal(found.features_RF[before_N[read_N]], pack.feature_NF[read_N])
    assert torch.equal(found.hidden_RH[before_N[read_N] + 1], pack.teacher_NH[read_N])


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter")
def test_gpu_target_computes_the_states_of_the_cpu_target(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.engine.fast_interpreter import patched_once  # imports kernels

    monkeypatch.setattr(gpu_prefill, "STEP_ROWS", 11)  # passes end within texts
    plain = random_target(TARGET, (0, 1), torch.device("cpu"))
    on_gpu = GpuPrefill.empty(TARGET, (0, 1), torch.device("cpu"), torch.float32)
    assert isinstance(plain, CpuPrefill)
    weights = plain.model.parameters()
    for name, weight in on_gpu.model.parameters().items():
        weight.copy_(weights[name])
    with patched_once():
        found = on_gpu.states(TEXTS)
    for first, second in zip(plain.states(TEXTS), found, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter")
@pytest.mark.parametrize(
    ("stored", "computed"), [(torch.float16, torch.float16), (torch.float32, torch.bfloat16)]
)
def test_gpu_target_computes_in_the_servers_dtype(
    tmp_path: Path, stored: torch.dtype, computed: torch.dtype
) -> None:
    weights = load_file(DEMO / "model.safetensors")
    save_file(
        {name: weight.to(stored) for name, weight in weights.items()},
        tmp_path / "model.safetensors",
    )
    target = GpuPrefill.load(tmp_path, ModelConfig.read(DEMO), (), torch.device("cpu"))
    assert target.embedding_VH.dtype == computed
    expected = weights["model.embed_tokens.weight"].to(computed)
    assert torch.equal(target.embedding_VH, expected)


@pytest.mark.long
def test_training_bench_runs_and_its_figures_reach_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "training.json"
    flags = ["--shape", "tiny", "--device", "cpu", "--budget", "96", "--documents", "5"]
    monkeypatch.setattr("tlt_server.bench.training.REPEATS", 1)
    assert main(["bench", "training", *flags, "--json", str(file)]) == 0
    found = json.loads(file.read_text())["figures"]
    assert found["objectives"].keys() == {*OBJECTIVES, *NETWORKS}
    assert all(row["tokens_per_s"] > 0 < row["read_ms"] for row in found["objectives"].values())
    again = found["recomputed"]["eagle3"]
    assert 0 < again["prefill_ms"] < again["step_ms"] and again["tokens"] > 0
    for layout in found["layouts"].values():
        assert layout["parts_ms"].keys() == {"forward", "loss", "backward", "optimizer"}
    assert found["layouts"]["packed"]["packed_is_faster"] == 1
    page = "\n".join(training(found))
    assert "eagle1" in page and f"{again['prefill_ms']:.1f} ms for" in page
