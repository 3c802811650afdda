"""A target of a shape without a checkpoint: its random weights are the same at every width, and
`tlt bench decode --shape` times it.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.engine.pushing import Pushable, cpu_settings
from tests.engine.two_ranks import one, shared
from tlt_server.__main__ import main
from tlt_server.bench import decode
from tlt_server.bench.padding.shapes import SHAPES, Shape, write_config
from tlt_server.bench.steps import random_requests
from tlt_server.engine.settings import EngineSettings
from tlt_server.models.loader import empty_target, fill_target
from tlt_server.models.numerics import Numerics
from tlt_server.process.machine import HostMemory

__all__ = ["one", "shared"]  # fixtures
TINY = Shape(
    "llama",
    hidden=64,
    intermediate=96,
    layers=2,
    heads=4,
    kv_heads=2,
    vocab=640,
    draft_vocab=0,
    max_position=1024,
    head_dim=16,
)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> EngineSettings:
    folder = tmp_path_factory.mktemp("shape")
    write_config(folder, TINY, "float32")
    return cpu_settings(folder, random_weights=True, reduction_leaves=2)


def test_random_weights_are_the_same_over_two_ranks(one: Pushable, shared: Pushable) -> None:
    found = []
    for engine in (one, shared):
        requests = random_requests(3, 20, 24, seed=1)
        engine.submit(*requests)
        engine.finish()
        found.append([(engine.tokens(each.id), engine.logprobs(each.id)) for each in requests])
    assert found[0] == found[1] and len(set(found[0][0][0])) > 10, "it does not say one token only"
    assert one.checksums() == shared.checksums()


def test_shape_too_large_for_memory_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(decode, "host_memory", lambda: HostMemory(2**30, 2**30))
    assert main(["bench", "decode", "--shape", "qwen2.5-7b"]) == 2
    assert "qwen2.5-7b has 28.4 GiB of float32 weights, and" in capsys.readouterr().err


def test_tensors_of_random_weights_differ_from_each_other(settings: EngineSettings) -> None:
    model = empty_target(settings.model, numerics=Numerics("strict"))
    fill_target(model.parameters(), model.config, None)
    seen = {tuple(tensor.flatten()[:8].tolist()) for tensor in model.parameters().values()}
    assert len(seen) == len(model.parameters())
    for name, tensor in model.parameters().items():
        assert torch.isfinite(tensor).all() and (tensor != 0).all(), name
        size = tensor.shape[-1] ** -0.5 if tensor.dim() > 1 else 1.0
        assert tensor.std() == pytest.approx(size, rel=0.3), name


def test_model_shape_is_timed_without_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    shape = ("bench", "decode", "--shape", "tiny")
    assert main([*shape, "--model", str(tmp_path)]) == 2
    assert "leave one of the two out" in capsys.readouterr().err
    flags = ("--tensor-parallel", "2", "--quick", "--batch", "2", "--json", str(tmp_path / "tiny"))
    assert main([*shape, *flags]) == 0
    figures = json.loads((tmp_path / "tiny").read_text())["figures"]
    assert (figures["shape"]["hidden"], figures["shape"]["vocab"]) == (TINY.hidden, TINY.vocab)
    assert (figures["drafter"], figures["tensor_parallel"]) == ("none", 2)
    [row] = figures["rows"]
    assert row["batch"] == 2 and row["step_ms"] > 0 and row["fingerprint"]["leaves"] == 2
