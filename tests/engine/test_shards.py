"""Shards of a target, all in one process: each rank's slices, and their sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.engine.test_strict_numerics import CONFIG, TOKENS
from tests.rows_of_one import Sequence as OneSequence
from tlt_client.channels.checksums import mix64
from tlt_kernels.gpu import sampling
from tlt_server.engine.devices.choice import SAMPLED_BLOCK, gpu_split
from tlt_server.errors import StartupError
from tlt_server.models.config import ModelConfig
from tlt_server.models.decoder import Decoder
from tlt_server.models.loader import fill
from tlt_server.models.numerics import METHODS, Numerics
from tlt_server.models.shards import SpreadTensor, check_ranks, pieces_of, vocabulary
from tlt_server.models.split import Split, folded
from tlt_server.weights.checksums import live_sums

LLAMA, QWEN3 = "LlamaForCausalLM", "Qwen3ForCausalLM"
# Two KV heads: shared by ranks at width 4; biases everywhere.
SHAPE = replace(CONFIG, heads=4, kv_heads=2, head_dim=64, tied_embeddings=False, mlp_bias=True)


class Lockstep:
    """An exchange between threads: all parts are there before one is read."""

    def __init__(self, ranks: int, order: Callable[[list[Tensor]], Sequence[Tensor]]) -> None:
        self._parts: list[Tensor] = [torch.empty(0)] * ranks
        self._barrier, self._order = Barrier(ranks, timeout=30), order

    def gathered(self, rank: int, part: Tensor) -> list[Tensor]:
        self._parts[rank] = part
        self._barrier.wait()
        parts = list(self._parts)
        self._barrier.wait()
        return parts

    def of(self, rank: int) -> LockstepOfOne:
        return LockstepOfOne(self, rank)

    def add(self, rank: int, part: Tensor) -> Tensor:
        return folded(self._order(self.gathered(rank, part)))


@dataclass(frozen=True)
class LockstepOfOne:
    group: Lockstep
    rank: int

    def add(self, part_RX: Tensor) -> Tensor:
        return self.group.add(self.rank, part_RX)

    def join(self, part_RX: Tensor, widths: Sequence[int], check: int) -> Tensor:
        return torch.cat(self.group.gathered(self.rank, part_RX), dim=1)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights of SHAPE with both kinds of norms and all biases, in one file."""
    directory = tmp_path_factory.mktemp("sharded")
    for family in (LLAMA, QWEN3):
        model = Decoder(with_biases(family), numerics=Numerics("fast"))
        generator = torch.Generator().manual_seed(4)
        tensors = {
            name: torch.randn(view.shape, generator=generator) * 0.06 + (view.dim() == 1)
            for name, view in model.own_parameters().items()
        }
        (directory / family).mkdir()
        save_file(tensors, directory / family / "model.safetensors")
    return directory


def with_biases(family: str) -> ModelConfig:
    return replace(SHAPE, architecture=family, attention_bias=family == LLAMA)


def sharded(family: str, checkpoint: Path, ranks: int, leaves: int, order=list):
    group = Lockstep(ranks, order)
    models = [
        Decoder(
            with_biases(family),
            numerics=Numerics("strict"),
            feature_layers=(1, 2),
            split=Split(leaves, rank, ranks, group.of(rank)),
        )
        for rank in range(ranks)
    ]
    models[0].peers = tuple(models[1:])
    fill(models[0].parameters(), checkpoint / family)
    for model in models:
        model.self_test()
    return models


def outputs(models: Sequence[Decoder]) -> list[Tensor]:
    """Logits and states of every rank, computed in chunks of several sizes."""

    def run(model: Decoder) -> Tensor:
        sequence, found, start = OneSequence(model, capacity=len(TOKENS)), [], 0
        for size in (100, 1, 7, 32):
            forward = sequence.extend(TOKENS[start : start + size])
            found.append(torch.cat([model.logits(forward.hidden_RH), forward.features_RF], dim=1))
            start += size
        return torch.cat(found)

    with ThreadPoolExecutor(len(models)) as pool:
        return list(pool.map(run, models))


@pytest.mark.parametrize("family", [LLAMA, QWEN3])
def test_every_width_gives_the_bits_of_one_rank(family: str, checkpoint: Path) -> None:
    [expected] = outputs(sharded(family, checkpoint, 1, 4))
    for ranks in (2, 4):
        for found in outputs(sharded(family, checkpoint, ranks, 4)):
            assert torch.equal(found, expected), f"{ranks} ranks"


def test_comparison_detects_parts_in_a_different_order(checkpoint: Path) -> None:
    """A negative control: `(p0 + p2) + (p1 + p3)` gives other bits."""
    [expected] = outputs(sharded(LLAMA, checkpoint, 1, 4))
    crossed = outputs(sharded(LLAMA, checkpoint, 4, 4, lambda parts: parts[::2] + parts[1::2]))
    assert not torch.equal(crossed[0], expected)
    torch.testing.assert_close(crossed[0], expected, rtol=1e-3, atol=1e-3)


def test_comparison_detects_a_shard_off_by_one_block(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A negative control: rank 0 has the second block of the vocabulary twice, and no first."""
    whole = sharded(LLAMA, checkpoint, 1, 4)[0].own_parameters()
    models = sharded(LLAMA, checkpoint, 2, 4)
    head = models[0].own_parameters()["lm_head.weight"]
    block = models[0].split.token_block
    head[:block] = whole["lm_head.weight"][block : 2 * block]
    assert not torch.equal(outputs(models)[0], outputs(sharded(LLAMA, checkpoint, 1, 4))[0])
    changed = live_sums(models[0].parameters())
    assert [name for name, view in whole.items() if changed[name] != mix64(view)] == [
        "lm_head.weight"
    ]


@pytest.mark.parametrize("ranks", [2, 4])
def test_shards_give_the_checksums_of_whole_tensors(checkpoint: Path, ranks: int) -> None:
    whole = sharded(LLAMA, checkpoint, 1, 4)[0].own_parameters()
    models = sharded(LLAMA, checkpoint, ranks, 4)
    parameters = models[0].parameters()
    assert live_sums(parameters) == {name: mix64(view) for name, view in whole.items()}
    assert {name: list(view.shape) for name, view in parameters.items()} == {
        name: list(view.shape) for name, view in whole.items()
    }
    for model, (name, view) in product(models, whole.items()):
        mine = model.own_parameters()[name]
        if mine.numel():
            kept = mine[..., -1:].clone()
            mine[..., -1:].add_(1)
            changed = live_sums({name: parameters[name]})[name]
            assert changed != mix64(view), f"rank {model.split.rank}, {name}"
            mine[..., -1:] = kept
    assert live_sums(parameters) == {name: mix64(view) for name, view in whole.items()}


def test_matmul_method_with_slice_dependent_bits_is_rejected(checkpoint: Path) -> None:
    class WideIsOther(Numerics):
        """Multiply by a wide weight in another order."""

        def linear(self, x_RK: Tensor, weight_KN: Tensor, bias_N: Tensor | None = None) -> Tensor:
            if self.method is METHODS[0] and weight_KN.shape[1] > 600:
                x_RK, weight_KN = x_RK.flip(1), weight_KN.flip(0)
            return super().linear(x_RK, weight_KN, bias_N)

    numerics = WideIsOther("strict")
    model = Decoder(with_biases(LLAMA), numerics=numerics, split=Split(2, 0, 2))
    fill_with_noise = torch.Generator().manual_seed(5)
    for view in model.own_parameters().values():
        view.copy_(torch.randn(view.shape, generator=fill_with_noise))
    model.self_test()
    assert numerics.method is not METHODS[0]


def test_ranks_share_a_kv_head_if_heads_are_fewer_than_ranks() -> None:
    name, splits = "model.layers.0.self_attn.k_proj.weight", Split(4, 0, 4).all
    spread = pieces_of([{name: torch.empty(64, 3)}] * 4, SHAPE, splits)[name]
    assert isinstance(spread, SpreadTensor)
    assert spread.starts == [0, 0, 64, 64] and spread.shape == (128, 3)


def test_gpu_ranks_hold_the_head_blocks_they_sample() -> None:
    given = SimpleNamespace(reduction_leaves=8, tensor_parallel=4)
    config = replace(SHAPE, vocab_size=9 * SAMPLED_BLOCK + 5)
    splits = [gpu_split(given, config, rank) for rank in range(4)]  # type: ignore[arg-type]
    spans = [vocabulary(config, split) for split in splits]
    block = sampling.BLOCK
    assert spans == [
        (0, 3 * block),
        (3 * block, 6 * block),
        (6 * block, 9 * block),
        (9 * block, 9 * block + 5),
    ]
    few = replace(config, vocab_size=5 * block)
    assert gpu_split(given, few).whole == ("lm_head",), "the last had none"  # type: ignore[arg-type]


def test_widths_splitting_a_head_are_refused_naming_valid_ones() -> None:
    with pytest.raises(StartupError, match=r"m has 4 heads, 2 KV heads.* use 1 or 2 or 4$"):
        check_ranks(SHAPE, 8, 8, "m")
    with pytest.raises(StartupError, match="a multiple of 512 inputs .*; use 1$"):
        check_ranks(SHAPE, 2, 512, "m")


def test_lone_rank_holds_every_tensor_whole() -> None:
    """A whole drafter's head has fewer tokens than the target."""
    for name in ("lm_head.weight", "midlayer.mlp.down_proj.weight"):
        shards = [{name: torch.empty(4, 4)}] * 2
        whole = pieces_of(shards, SHAPE, [Split(2), Split(2)])[name]
        assert whole.shape == (4, 4) != pieces_of(shards, SHAPE, Split(2, 0, 2).all)[name].shape
