"""Decoders of 2, 4 and 8 ranks in lockstep on one device: every hidden state, feature, key and
value has the bits of one rank that has the whole.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.engine.fast_interpreter import patched_once
from tests.engine.lockstep import LockstepPeers, Turns, group, in_lockstep, turns_of
from tests.kernels.triton_tests import DEVICE, assert_same_bits, gpu
from tlt_kernels.gpu.accept import fields
from tlt_kernels.gpu.agreement import SUM_FLOATS
from tlt_kernels.gpu.exchange import PeerWindows
from tlt_kernels.gpu.sampling import BLOCK
from tlt_kernels.gpu.tensors import PAGE_SIZE, RowTable
from tlt_server.attention.gpu import TritonPaged
from tlt_server.engine.gpu.steps.agreement import Agreement, differing, missed
from tlt_server.engine.gpu.steps.head import PARTS, SharedHead
from tlt_server.models import Forward
from tlt_server.models.config import ModelConfig
from tlt_server.models.gpu.decoder import GpuDecoder
from tlt_server.models.gpu.layers import RowTensors
from tlt_server.models.gpu.matmuls import StrictMatmuls
from tlt_server.models.gpu.placement import Placement
from tlt_server.models.gpu.sums import RankSums, room_floats
from tlt_server.models.quantization import Quantization
from tlt_server.models.shards import pieces_of, vocabulary
from tlt_server.models.shards import whole as whole_tensor
from tlt_server.models.split import Split

DTYPE = torch.float32 if DEVICE == "cpu" else torch.bfloat16
PLACEMENT = Placement(torch.device(DEVICE), DTYPE, StrictMatmuls())
ROWS = (1, 8, 16, 17, 33, 64, 65, 200, 256, 300, 512, 2048)


class Model(NamedTuple):
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    leaves: int
    family: str = "Qwen2"
    quantization: Quantization | None = None

    def config(self) -> ModelConfig:
        raw = {
            "architectures": [f"{self.family}ForCausalLM"],
            "vocab_size": 512,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": 2,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": 128,
            "max_position_embeddings": max(ROWS),
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "attention_bias": self.family == "Qwen2",
        }
        return replace(ModelConfig.parse(raw, "lockstep"), quantization=self.quantization)


SMALL = Model(32, 4, 2, 512, 4)
FP8 = Model(128, 4, 2, 512, 4, quantization=Quantization(("layers.1.mlp",)))
MODELS = {
    "4b": Model(2560, 32, 8, 9728, 4, "Qwen3"),
    "7b": Model(3584, 28, 4, 18944, 4),
    "8b": Model(4096, 32, 8, 14336, 8),
    "32b": Model(5120, 40, 8, 27648, 8),
    "70b": Model(8192, 64, 8, 28672, 8),
}


class Rank:
    def __init__(self, config: ModelConfig, placement: Placement, split: Split) -> None:
        self.split = split
        self.model = GpuDecoder(config, placement=placement, feature_layers=(1, 2), split=split)
        pages = -(-max(ROWS) // PAGE_SIZE)
        self.cache = placement.cache(self.model.own_config, pages, 1, config.layers)

    def forward(self, token_R: Tensor) -> Forward:
        """Compute one prompt."""
        count, config = len(token_R), self.model.own_config
        rows = RowTable.allocate(count, 1, device=DEVICE)
        position_R = torch.arange(count, dtype=torch.int32, device=DEVICE)
        for each in (rows.position_R, rows.kv_slot_R):
            each.copy_(position_R)
        rows.token_R.copy_(token_R)
        rows.batch_slot_R.zero_()
        rows.base_R.fill_(count)
        attention = TritonPaged(
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            context=max(ROWS),
            device=torch.device(DEVICE),
            dtype=DTYPE,
        ).planned(count, prompt_rows=count)
        pages = len(self.cache.k[0]) // PAGE_SIZE
        page_table = torch.arange(pages, dtype=torch.int32, device=DEVICE).view(1, -1)
        attention.plan(rows, page_table)
        tensors = RowTensors(rows.token_R, rows.position_R, rows.kv_slot_R)
        return self.model.forward(tensors, self.cache, attention)


def whole_of(config: ModelConfig, leaves: int) -> Rank:
    rank = Rank(config, PLACEMENT, Split(leaves))
    generator = torch.Generator(DEVICE).manual_seed(0)
    for each in rank.model.own_parameters().values():
        each.copy_(0.02 * torch.randn(each.shape, generator=generator, device=DEVICE))
    return rank


def ranks_of(whole: Rank, count: int, rows: int) -> list[Rank]:
    config, leaves = whole.model.config, whole.split.leaves
    turns, floats = Turns(count), room_floats(leaves // count, rows, config.hidden_size)
    made = []
    for peers in group(count, floats):
        placement = replace(PLACEMENT, sums=RankSums(LockstepPeers(peers, turns)))
        split = Split(leaves, peers.rank, count)
        made.append(Rank(config, placement, split))
    shards = [rank.model.own_parameters() for rank in made]
    for name, spread in pieces_of(shards, config, [rank.split for rank in made]).items():
        spread.copy_(whole_tensor(whole.model.own_parameters()[name]))
    return made


def computed(ranks: list[Rank], token_R: Tensor) -> list[Forward]:
    [turns] = {turns_of(rank.model.placement.sums) for rank in ranks}
    return in_lockstep(turns, [partial(rank.forward, token_R) for rank in ranks])


def check(model: Model, widths: tuple[int, ...], all_rows: tuple[int, ...]) -> None:
    config = model.config()
    whole = whole_of(config, model.leaves)
    generator = torch.Generator().manual_seed(1)
    token_R = torch.randint(512, (max(all_rows),), generator=generator).to(DEVICE)
    for width in widths:
        ranks = ranks_of(whole, width, max(all_rows))
        for rows in all_rows:
            what = f"{rows} rows, {width} ranks"
            with torch.inference_mode():
                expected = whole.forward(token_R[:rows])
            for rank, found in zip(ranks, computed(ranks, token_R[:rows]), strict=True):
                name = f"{what}, rank {rank.split.rank}"
                assert_same_bits(f"{name}, hidden", found.hidden_RH, expected.hidden_RH)
                assert_same_bits(f"{name}, features", found.features_RF, expected.features_RF)
                first = rank.split.rank * config.kv_heads // width
                heads = slice(first, first + rank.model.own_config.kv_heads)
                for mine, all_heads in zip(rank.cache.k, whole.cache.k, strict=True):
                    assert_same_bits(f"{name}, keys", mine[:rows], all_heads[:rows, heads])
                for mine, all_heads in zip(rank.cache.v, whole.cache.v, strict=True):
                    assert_same_bits(f"{name}, values", mine[:rows], all_heads[:rows, heads])


@pytest.mark.skipif(DEVICE != "cpu", reason="the interpreter's")
def test_decoders_in_lockstep_have_the_bits_of_one_decoder() -> None:
    """Four ranks share two KV heads."""
    with patched_once():
        check(SMALL, (2, 4), (3,))
        check(FP8, (2, 4), (3,))


@pytest.mark.skipif(DEVICE != "cpu", reason="the interpreter's")
def test_comparison_detects_ranks_in_a_different_order(monkeypatch: pytest.MonkeyPatch) -> None:
    in_order = group

    def swapped(ranks: int, floats: int) -> list[PeerWindows]:
        peers = in_order(ranks, floats)
        for each in peers:
            each.address_T[1:3] = each.address_T[1:3].flip(0)
        return peers

    monkeypatch.setattr(sys.modules[__name__], "group", swapped)
    with patched_once(), pytest.raises(AssertionError, match="4 ranks, rank 0, hidden: .* differ"):
        check(SMALL, (4,), (3,))


def check_logits(config: ModelConfig, leaves: int, ranks: int, rows: int, floats: int) -> None:
    """`floats`: elements of a room, next to those of the ranks' sums."""
    generator, turns = torch.Generator(DEVICE).manual_seed(2), Turns(ranks)
    hidden_RH = torch.randn(rows, config.hidden_size, generator=generator, device=DEVICE).to(DTYPE)
    whole = whole_of(config, leaves).model
    expected, computing = whole.logits(hidden_RH), []
    for windows in group(ranks, floats + SUM_FLOATS):
        split = Split(leaves, windows.rank, ranks, token_block=BLOCK)
        model = GpuDecoder(config, placement=PLACEMENT, split=split)
        model.head_WH.copy_(whole.head_WH[slice(*vocabulary(config, split))])
        out_RV = torch.full_like(expected, float("nan"))
        head = SharedHead(LockstepPeers(windows, turns))
        computing.append(partial(head.logits, model, hidden_RH, out_RV))
    for found in in_lockstep(turns, computing):
        assert_same_bits(f"logits of {rows} rows, {ranks} ranks", found, expected)


@pytest.mark.skipif(DEVICE != "cpu", reason="the interpreter's")
def test_ranks_gather_logits_in_buffer_sized_pieces() -> None:
    """The last rank has less than half a block, so nothing of its second part."""
    config = replace(SMALL.config(), vocab_size=BLOCK + 300)
    with patched_once():
        check_logits(config, SMALL.leaves, 2, 5, floats=2 * BLOCK // PARTS)


@gpu
@pytest.mark.parametrize("name, vocabulary", [("7b", 152064), ("4b", 151936), ("8b", 128256)])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("rows", [1, 32, 432])
def test_ranks_gather_all_logits_of_a_real_head(
    name: str, vocabulary: int, rows: int, ranks: int
) -> None:
    config = replace(MODELS[name].config(), vocab_size=vocabulary)
    check_logits(config, 4, ranks, rows, floats=100 * vocabulary // ranks // PARTS)


@gpu
@pytest.mark.parametrize("name", MODELS)
def test_lockstep_decoders_of_real_shapes_equal_one_decoder(name: str) -> None:
    model = MODELS[name]
    check(model, tuple(width for width in (2, 4, 8) if width <= model.leaves), ROWS)


def missed_by(number: int) -> torch.Tensor:
    """Say that rank 0 was waited for in this exchange."""
    return torch.tensor([1, number], dtype=torch.int32, device=DEVICE)


def test_each_rank_reports_which_peer_was_late() -> None:
    turns = Turns(2)
    peers = [LockstepPeers(each, turns) for each in group(2, SUM_FLOATS)]
    agreements = [Agreement(each) for each in peers]
    for each in peers:
        each.missed = torch.zeros_like(missed_by(0))
    rows, hidden_RH = RowTable.allocate(1, 1, device=DEVICE), torch.ones(1, 32, device=DEVICE)
    outcome_EF = torch.zeros(1, fields(2), dtype=torch.int32, device=DEVICE)

    def found() -> list[tuple[int, int]]:
        [words, others] = [each.found_TW.flatten().tolist() for each in agreements]
        assert words == others and differing(words) == []
        return missed(words)

    add = [partial(each.add, hidden_RH, rows, outcome_EF) for each in agreements]
    in_lockstep(turns, add)
    assert found() == [(0, 0), (0, 0)]
    peers[1].missed = missed_by(27)
    in_lockstep(turns, [each.gather_again for each in agreements])
    assert found() == [(0, 0), (1, 27)]
    peers[1].missed = missed_by(28)
    in_lockstep(turns, add)
    assert found() == [(0, 0), (1, 28)]
