"""Drafters of several ranks in lockstep on one device: every hint, child, key and value has the
bits of one rank that has the whole.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.engine.fast_interpreter import patched_once
from tests.engine.lockstep import LockstepPeers, Turns, group, in_lockstep, turns_of
from tests.engine.test_gpu_lockstep import DTYPE, FP8, MODELS, PLACEMENT, SMALL, Model
from tests.kernels.triton_tests import DEVICE, assert_same_bits, gpu
from tlt_kernels.gpu.agreement import SUM_FLOATS
from tlt_kernels.gpu.children import candidate_words
from tlt_kernels.gpu.tensors import PAGE_SIZE, BatchSlots, RowTable
from tlt_server.attention.gpu import TritonPaged
from tlt_server.models.config import ModelConfig
from tlt_server.models.draft_checkpoint import Described
from tlt_server.models.draft_networks import EAGLE1, EAGLE3
from tlt_server.models.gpu.decoder import GpuDecoder
from tlt_server.models.gpu.eagle import GpuEagle1, GpuEagle3, GpuEagleNetwork
from tlt_server.models.gpu.layers import RowTensors
from tlt_server.models.gpu.placement import Placement
from tlt_server.models.gpu.sums import RankSums, room_floats
from tlt_server.models.shards import pieces_of
from tlt_server.models.shards import whole as whole_tensor
from tlt_server.models.split import Split
from tlt_server.settings.server import DrafterParallel

WIDTH, LEVELS = 3, 2
NETWORKS: dict[str, type[GpuEagleNetwork]] = {EAGLE3: GpuEagle3, EAGLE1: GpuEagle1}


class Drafted(NamedTuple):
    hint_RH: Tensor
    token_RW: Tensor
    score_RW: Tensor


class Rank:
    def __init__(
        self, config: ModelConfig, drafted: int, placement: Placement, split: Split, rows: int
    ) -> None:
        """`config`: the target's, with the drafter's architecture."""
        of_target = replace(config, architecture="Qwen2ForCausalLM")
        target = GpuDecoder(of_target, placement=placement, feature_layers=(0, 1, 1), split=split)
        described = Described(replace(config, layers=1), drafted)
        self.network = NETWORKS[config.architecture](described, target)
        self.rows, own = rows, self.network.part.layer
        self.pages = -(-LEVELS * rows // PAGE_SIZE)
        self.cache = placement.cache(own, self.pages, 1, self.network.kv_layers)
        self.attention = TritonPaged(
            heads=own.heads,
            kv_heads=own.kv_heads,
            head_dim=own.head_dim,
            context=config.max_position,
            device=torch.device(DEVICE),
            dtype=DTYPE,
        )
        self.slots = BatchSlots.allocate(1, PAGE_SIZE, hidden=1, device=DEVICE)
        self.slots.temperature_Q.fill_(0.8)

    def draft(self, token_R: Tensor, hint_RH: Tensor) -> list[Drafted]:
        """Draft after rows of one sequence, then after as many rows that have their hints."""
        found, hint_RH = list[Drafted](), hint_RH.clone()
        for level in range(LEVELS):
            first = level * self.rows
            rows = RowTable.allocate(self.rows, 1, device=DEVICE)
            for each in (rows.position_R, rows.kv_slot_R):
                each.copy_(torch.arange(first, first + self.rows))
            rows.token_R.copy_(token_R)
            rows.batch_slot_R.zero_()
            rows.base_R.fill_(first + self.rows)
            attend = self.attention.planned(self.rows, prompt_rows=self.rows)
            page_table = torch.arange(self.pages, dtype=torch.int32, device=DEVICE).view(1, -1)
            attend.plan(rows, page_table)
            tensors = RowTensors(rows.token_R, rows.position_R, rows.kv_slot_R)
            logits_RC = self.network.forward(tensors, hint_RH, self.cache, attend)
            children = self.network.children(logits_RC, rows, self.slots, width=WIDTH, level=level)
            found.append(Drafted(hint_RH.clone(), *children))
        return found


def whole_of(config: ModelConfig, drafted: int, leaves: int, rows: int) -> Rank:
    rank = Rank(config, drafted, PLACEMENT, Split(leaves), rows)
    generator = torch.Generator(DEVICE).manual_seed(0)
    network = rank.network
    read = [network.embedding_VH]
    if not network.own_head:
        read.append(network.head_matrix.values)
    for each in [*network.own_parameters().values(), *read]:
        each.copy_(0.05 * torch.randn(each.shape, generator=generator, device=DEVICE))
    return rank


def ranks_of(whole: Rank, config: ModelConfig, leaves: int, count: int) -> list[Rank]:
    network, made, turns = whole.network, list[Rank](), Turns(count)
    floats = room_floats(leaves // count, whole.rows, network.config.hidden_size)
    floats += candidate_words(whole.rows, network.draft_vocab_size, WIDTH) + SUM_FLOATS
    how: DrafterParallel = "shared" if network.config.architecture == EAGLE3 else "auto"
    for peers in group(count, floats):
        sums = RankSums(LockstepPeers(peers, turns))
        placement = replace(PLACEMENT, sums=sums, drafter_parallel=how)
        split = Split(leaves, peers.rank, count)
        rank = Rank(config, network.draft_vocab_size, placement, split, whole.rows)
        assert rank.network.part.head_split.of == count
        rank.network.embedding_VH.copy_(network.embedding_VH)
        if not network.own_head:
            tokens = rank.network.part.tokens
            rank.network.head_matrix.values.copy_(network.head_matrix.values[tokens])
        made.append(rank)
    parts = [rank.network.part for rank in made]
    shards = [rank.network.own_parameters() for rank in made]
    for name, spread in pieces_of(shards, parts[0].head, [part.split for part in parts]).items():
        spread.copy_(whole_tensor(network.own_parameters()[name]))
    return made


def check(
    model: Model, drafted: int, widths: tuple[int, ...], rows: int, architecture: str = EAGLE3
) -> None:
    config = replace(model.config(), architecture=architecture)
    whole = whole_of(config, drafted, model.leaves, rows)
    generator = torch.Generator().manual_seed(1)
    token_R = torch.randint(512, (rows,), generator=generator).to(DEVICE)
    hint_RH = torch.randn(rows, config.hidden_size, generator=generator).to(DEVICE)
    with torch.inference_mode():
        expected = whole.draft(token_R, hint_RH)
    for width in widths:
        ranks = ranks_of(whole, config, model.leaves, width)
        [turns] = {turns_of(rank.network.placement.sums) for rank in ranks}
        found = in_lockstep(turns, [partial(rank.draft, token_R, hint_RH) for rank in ranks])
        for rank, levels in zip(ranks, found, strict=True):
            name = f"{rows} rows, {width} ranks, rank {rank.network.part.head_split.rank}"
            for mine, of_one in zip(levels, expected, strict=True):
                assert torch.equal(mine.token_RW, of_one.token_RW), name
                assert_same_bits(f"{name}, scores", mine.score_RW, of_one.score_RW)
                assert_same_bits(f"{name}, hints", mine.hint_RH, of_one.hint_RH)


@pytest.mark.skipif(DEVICE != "cpu", reason="the interpreter's")
def test_drafters_in_lockstep_have_the_bits_of_one_drafter() -> None:
    """The last rank has fewer draft tokens. Four ranks share two KV heads."""
    with patched_once():
        check(SMALL, 60, (2, 4), 3)
        check(FP8, 300, (2,), 3)


@pytest.mark.skipif(DEVICE != "cpu", reason="the interpreter's")
def test_ranks_sharing_only_the_head_draft_like_one_rank() -> None:
    """An EAGLE-1 drafts with the target's head, and exchanges nothing else."""
    with patched_once():
        check(SMALL, 512, (2,), 3, EAGLE1)


@gpu
@pytest.mark.parametrize("rows", [1, 8, 32, 256])
@pytest.mark.parametrize("name", MODELS)
def test_lockstep_drafters_of_real_shapes_equal_one_drafter(name: str, rows: int) -> None:
    model = MODELS[name]
    check(model, 32_000, tuple(width for width in (2, 4, 8) if width <= model.leaves), rows)
