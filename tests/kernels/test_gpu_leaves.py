"""Leaves of K: one tree of additions, wherever it is cut. Ranks that own neighbouring leaves give
the bits of the whole, here in one process; another order does not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.kernels.triton_tests import DEVICE, assert_same_bits, gpu
from tlt_kernels import reference, versions
from tlt_kernels.gpu.gemm import gated, linear, partials
from tlt_kernels.gpu.gemm_tiles import _STREAM, PARTS, Kind, leaf_size, portable_tile
from tlt_kernels.gpu.norm import add, add_rms_norm
from tlt_kernels.gpu.quantise import Matrix

DTYPE = torch.float32 if DEVICE == "cpu" else torch.bfloat16
EPS = 1e-6
# (version of the numerics, leaves) -> SHA-256 of sums over 1024 inputs
GOLDEN = {
    (1, 1): "6f97f42dfae7d979ce95813dc697846b2f0a72cdc52f3dbfda184ab33d6ba4ca",
    (1, 2): "b0d78caaac72e0793fe5dc11851b302dc085b64d0a90b8f692fb983bc693787a",
    (1, 4): "eb517ddaa89fb26d5a91a32348b0022b28c768080ce45fc9184cd9b661f9c0ab",
    (1, 8): "3429140d20ee46c56e847689f7cdb5b88bb5edeb138fea71fd71461840b6cf47",
}


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = DTYPE) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, device=DEVICE).to(dtype)


def summed(part_PMN: Tensor) -> Tensor:
    return add(part_PMN, torch.zeros(part_PMN.shape[1:], device=DEVICE), torch.float32)


def exact_leaves(leaves: int) -> tuple[Tensor, Tensor]:
    """Return x and weight whose leaves have exact sums, on any processor and in either dtype; what
    rounds is the addition of leaves.
    """
    generator = torch.Generator().manual_seed(22)
    x, weight = torch.randint(-128, 129, (2, 53, 1024), generator=generator).float()
    scale = torch.tensor([2.0**e for e in (0, 12, 6, 11, 3, 10, 1, 8)[:leaves]])
    x *= scale.repeat_interleave(1024 // leaves)
    return x[:5].to(DEVICE, DTYPE), weight[5:].to(DEVICE, DTYPE)


@pytest.mark.parametrize("leaves", [1, 2, 4, 8])
def test_partial_sums_are_added_in_tree_order(leaves: int) -> None:
    x, weight = exact_leaves(leaves)
    found = summed(partials(x, Matrix(weight), leaves=leaves))
    in_one = partials(x, Matrix(weight), leaves=leaves, parts=1)
    assert len(in_one) == max(1, leaves // 4)
    assert_same_bits("leaves added in registers", summed(in_one), found)
    leaf_LMN = reference.leaf_sums(x.float(), weight.float(), 1024 // leaves)
    assert_same_bits("sum of leaves", found, reference.tree(leaf_LMN))
    assert hashlib.sha256(found.cpu().numpy().tobytes()).hexdigest() == GOLDEN[versions.GPU, leaves]
    if leaves > 2:  # a + b = b + a
        in_order = leaf_LMN[0].clone()
        for leaf_MN in leaf_LMN[1:]:
            in_order += leaf_MN
        with pytest.raises(AssertionError, match="differ in their bits"):
            assert_same_bits("leaves in order", in_order, found)


@pytest.mark.parametrize(
    "inputs, leaves, parts", [(256, 4, 1), (384, 4, 2), (640, 8, 2), (40, 2, 1)]
)
def test_short_reduction_has_fewer_leaves(inputs: int, leaves: int, parts: int) -> None:
    x, weight = draw(3, inputs), draw(16, inputs, seed=1)
    part_PMN = partials(x, Matrix(weight), leaves=leaves)
    leaf = leaf_size(inputs, leaves)
    assert len(part_PMN) == parts and leaf % 128 == 0
    each_LMN = [
        partials(
            x[:, k : k + leaf].contiguous(), Matrix(weight[:, k : k + leaf].contiguous()), leaves=1
        )[0]
        for k in range(0, inputs, leaf)
    ]
    assert_same_bits("sum", summed(part_PMN), reference.tree(torch.stack(each_LMN)))


def test_leaves_that_are_not_a_power_of_two_are_refused() -> None:
    with pytest.raises(ValueError, match="cut into 3 leaves; take one of"):
        partials(draw(1, 128), Matrix(draw(16, 128)), leaves=3)


def test_up_to_four_leaves_every_tile_writes_two_partial_sums() -> None:
    """An adapter is added to the first of them, so their number may not depend on rows."""
    for leaves, kind in ((2, Kind.PARTIALS), (4, Kind.FOLDED)):
        tiles = [tile for _, each in _STREAM[kind] for tile in each]
        tiles += [portable_tile(rows, DTYPE) for rows in (1, 64, 256, 2048)]
        assert all(leaves // tile.fold(leaves, PARTS) == PARTS for tile in tiles)


def test_partial_sums_of_a_program_fit_its_registers() -> None:
    """Sums of 192 registers per thread make ptxas spill, and serialize the tensor cores' steps."""
    for kind in (Kind.PARTIALS, Kind.FOLDED):
        for tile in (tile for _, each in _STREAM[kind] for tile in each):
            sums = tile.most.bit_length()
            assert sums * tile.rows * tile.columns <= 128 * 32 * tile.warps, tile


class Shape(NamedTuple):
    """Sizes of a layer: H hidden, query heads of a width, I intermediate."""

    hidden: int
    heads: int
    intermediate: int
    head_dim: int = 128


SMALL = Shape(32, 8, 1024)
SHAPES = {
    "7b": Shape(3584, 28, 18944),
    "8b": Shape(4096, 32, 14336),
    "32b": Shape(5120, 40, 27648),
    "70b": Shape(8192, 64, 28672),
}


class Layer:
    """The matmuls of a layer without attention: each head's query is its output."""

    def __init__(self, shape: Shape, leaves: int) -> None:
        self.shape, self.leaves = shape, leaves
        width = shape.heads * shape.head_dim
        self.q = draw(width, shape.hidden, seed=1) * 0.05
        self.o = draw(shape.hidden, width, seed=2) * 0.05
        self.gate, self.up = (draw(shape.intermediate, shape.hidden, seed=i) * 0.05 for i in (3, 4))
        self.down = draw(shape.hidden, shape.intermediate, seed=5) * 0.05
        self.norm = draw(shape.hidden, seed=6)

    def __call__(
        self,
        x: Tensor,
        ranks: int,
        order: Callable[[list[Tensor]], list[Tensor]] = lambda parts: parts,
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield what `ranks` ranks compute; `order` may put their partial sums in another one."""
        residual, leaves = torch.zeros(x.shape, device=DEVICE), self.leaves // ranks

        def shards(weight: Tensor, dim: int) -> list[Tensor]:
            return [each.contiguous() for each in weight.chunk(ranks, dim)]

        def added(inputs: list[Tensor], weight: Tensor) -> Tensor:
            both = zip(inputs, shards(weight, 1), strict=True)
            parts = [partials(each, Matrix(shard), leaves=leaves) for each, shard in both]
            return add_rms_norm(torch.cat(order(parts)), residual, self.norm, EPS)

        heads = [linear(x, Matrix(shard)) for shard in shards(self.q, 0)]
        yield "queries", torch.cat(heads, dim=1)
        normed = added(heads, self.o)
        yield "after o", normed
        both = zip(shards(self.gate, 0), shards(self.up, 0), strict=True)
        inner = [gated(normed, Matrix(torch.cat(pair))) for pair in both]
        yield "gated", torch.cat(inner, dim=1)
        yield "after down", added(inner, self.down)
        yield "residual", residual


def check_ranks(shape: Shape, leaves: int, rows: tuple[int, ...]) -> None:
    layer, x = Layer(shape, leaves), draw(max(rows), shape.hidden)
    for count in rows:
        whole = dict(layer(x[:count], 1))
        for ranks in (2, 4, 8):
            if ranks <= leaves:
                for name, found in layer(x[:count], ranks):
                    what = f"{name}, {count} rows, {ranks} of {leaves}"
                    assert_same_bits(what, found, whole[name])


def test_ranks_in_lockstep_give_the_bits_of_one_rank() -> None:
    check_ranks(SMALL, 8, (1,))
    check_ranks(SMALL, 2, (1,))


@gpu
@pytest.mark.parametrize("model", SHAPES)
def test_lockstep_ranks_of_real_shapes_give_the_bits_of_one_rank(model: str) -> None:
    leaves = 4 if model == "7b" else 8  # a leaf is some whole heads
    rows = (1, 8, 16, 17, 32, 33, 64, 65, 128, 129, 256, 300, 384, 400, 512, 700, 2048)
    check_ranks(SHAPES[model], leaves, rows)


def test_comparison_detects_ranks_added_in_a_different_order() -> None:
    """Compare residuals, which are float32: what is rounded to bfloat16 may agree."""
    layer, x = Layer(SMALL, 4), draw(3, SMALL.hidden)
    whole = dict(layer(x, 1))
    found = dict(layer(x, 4, lambda parts: [parts[i] for i in (0, 2, 1, 3)]))
    assert_same_bits("queries", found["queries"], whole["queries"])
    with pytest.raises(AssertionError, match="differ in their bits"):
        assert_same_bits("residual", found["residual"], whole["residual"])


@gpu
@pytest.mark.parametrize("leaves", [1, 2, 4, 8])
def test_row_bits_do_not_depend_on_leaves_per_program(leaves: int) -> None:
    """Compare tiles of 16 to 256 rows, which add one, two or four leaves in registers."""
    x, weight = draw(2048, 4096), draw(1008, 4096, seed=1) * 0.02
    whole = summed(partials(x, Matrix(weight), leaves=leaves))
    leaf_LMN = torch.stack(
        [
            partials(
                x[:, k : k + 4096 // leaves].contiguous(), Matrix(shard.contiguous()), leaves=1
            )[0]
            for k, shard in zip(
                range(0, 4096, 4096 // leaves), weight.chunk(leaves, 1), strict=True
            )
        ]
    )
    assert_same_bits("2048 rows", whole, reference.tree(leaf_LMN))
    for rows in (1, 16, 17, 32, 64, 65, 128, 200, 256, 300, 384, 512, 700):
        for parts in (1, 2):
            found = summed(partials(x[:rows], Matrix(weight), leaves=leaves, parts=parts))
            assert_same_bits(f"{rows} of 2048 rows, {parts}", found, whole[:rows])
