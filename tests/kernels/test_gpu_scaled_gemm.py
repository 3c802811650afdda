"""Matmuls of e4m3 operands with scales: against the slow twin, and the bits of a row in any
company, tile and cut of K.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor

from tests.kernels.test_gpu_gemm import SHARED_BYTES, LastLaunched, shared_bytes
from tests.kernels.triton_tests import DEVICE, assert_close, assert_same_bits, gpu
from tlt_client.quantise import quantise
from tlt_kernels import reference
from tlt_kernels.gpu import gemm_portable
from tlt_kernels.gpu.gemm import gated, in_use, linear, partials
from tlt_kernels.gpu.gemm_tiles import _SCALED, LEAF_UNIT, Kind, Tile, leaf_size, portable_tile
from tlt_kernels.gpu.quantise import BLOCK, E4M3, Matrix, Quantised, quantise_rows

DTYPE = torch.float32 if DEVICE == "cpu" else torch.bfloat16
ROUNDED = 1e-5 if DEVICE == "cpu" else 4e-3  # to DTYPE
SUMMED = 1e-5 if DEVICE == "cpu" else 2e-4  # tensor cores keep fewer bits of a sum of 128 products
SHAPES = [(1, 40, 128), (3, 200, 384), (17, 33, 256), (70, 130, 128)]
EVERY_BYTE = torch.arange(256, dtype=torch.uint8)
FINITE = EVERY_BYTE[(EVERY_BYTE & 0x7F) != 0x7F].view(E4M3)


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Normal values whose rows have very different sizes."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    sizes = torch.exp2(3 * torch.randn(shape[0], 1, generator=generator))
    return (torch.randn(shape, generator=generator) * sizes).bfloat16().to(DEVICE, DTYPE)


def matrix(n: int, k: int) -> Matrix:
    values, scales = quantise(draw(n, k, seed=1))
    return Matrix(values, scales * 1.7)  # a checkpoint's need not be powers of two


def twin(x: Quantised, weight: Matrix, leaf: int = 1 << 30) -> Tensor:
    assert weight.scales is not None
    operands = (*x, weight.values, weight.scales)
    return reference.scaled_leaf_sums(*(each.cpu() for each in operands), leaf).to(DEVICE)


@pytest.mark.parametrize("m, n, k", SHAPES)
def test_scaled_matmul_matches_its_twin(m: int, n: int, k: int) -> None:
    x, weight, bias = draw(m, k), matrix(n, k), draw(n, 1, seed=2).view(n)
    rows = quantise_rows(x)
    expected = twin(rows, weight)[0]
    assert linear(x, weight).dtype == DTYPE
    assert_close("rounded", linear(x, weight), expected, ROUNDED)
    exact = linear(rows, weight, bias, out_dtype=torch.float32)
    assert_close("with bias", exact, expected + bias.float(), SUMMED)
    assert_same_bits("plain x", linear(x, weight, bias, out_dtype=torch.float32), exact)
    assert linear(rows, weight).dtype == torch.bfloat16


@pytest.mark.parametrize("rows, inner, k", [(1, 128, 128), (5, 256, 384)])
def test_gated_scaled_matmul_matches_its_twin(rows: int, inner: int, k: int) -> None:
    x, weight = draw(rows, k), matrix(2 * inner, k)
    assert weight.scales is not None
    weight.scales[inner // BLOCK :] *= 2.0**-3  # up has scales of its own
    gate, up = twin(quantise_rows(x), weight)[0].double().chunk(2, dim=1)
    found = gated(x, weight)
    assert found.dtype == DTYPE
    assert_close("gated", found, torch.nn.functional.silu(gate) * up, ROUNDED)


@cache
def company(k: int) -> Tensor:
    x = draw(70, k)
    x[3] = 0.0
    x[5, k // 2] = 1e4
    x[6] *= 2.0**-60
    return x


@pytest.mark.parametrize("name", ["linear", "partials", "gated"])
def test_scaled_bits_of_a_row_do_not_depend_on_other_rows(name: str) -> None:
    k = 640
    x, weight = company(k), matrix(256, k)
    kernels: dict[str, Callable[[Tensor], Tensor]] = {
        "linear": lambda rows: linear(rows, weight, out_dtype=torch.float32),
        "partials": lambda rows: reference.tree(partials(rows, weight, leaves=4)),
        "gated": lambda rows: gated(rows, weight),
    }
    whole = kernels[name](x)
    assert not whole[3].any() and whole[5].isfinite().all()
    for rows in (slice(3, 4), slice(5, 6), slice(1, 18), slice(0, 33)):
        assert_same_bits(f"{name} {rows}", kernels[name](x[rows].contiguous()), whole[rows])


@pytest.mark.parametrize("scale", [2.0**-30, 2.0**-9, 1.0, 2.0**7])
def test_every_byte_is_multiplied_exactly(scale: float) -> None:
    """Rows and weights in turn are the unit matrix."""
    values = torch.cat([FINITE, torch.zeros(2).to(E4M3)]).view(2, BLOCK).to(DEVICE)
    unit = torch.eye(BLOCK, device=DEVICE)
    ones = torch.ones(1, 1, device=DEVICE)
    expected = values.float() * scale
    found = linear(unit.to(DTYPE), Matrix(values, ones * scale), out_dtype=torch.float32)
    assert torch.equal(found.T, expected)
    rows = Quantised(values, ones.expand(1, 32).contiguous() * scale)
    found = linear(rows, Matrix(unit.to(E4M3), ones), out_dtype=torch.float32)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("leaves", [1, 2, 4])
def test_scaled_sums_are_added_in_order(leaves: int) -> None:
    """Sums of 128 products are exact here; adding them up rounds, and shows their order."""
    generator = torch.Generator().manual_seed(22)
    m, n, groups = 5, 48, 11
    x, w = torch.randint(-3, 4, (2, n, groups * BLOCK), generator=generator).float()
    exponents = torch.randint(-12, 12, (groups, 32), generator=generator)
    rows = Quantised(x[:m].to(DEVICE).to(E4M3), torch.exp2(exponents.float()).to(DEVICE))
    scales = torch.exp2(torch.randint(-9, 9, (1, groups), generator=generator).float())
    weight = Matrix(w.to(DEVICE).to(E4M3), scales.to(DEVICE))
    leaf = leaf_size(groups * BLOCK, leaves)
    expected = reference.tree(twin(rows, weight, leaf))
    for parts in (1, 2):
        found = partials(rows, weight, leaves=leaves, parts=parts)
        assert_same_bits(f"{leaves} leaves, {parts} parts", reference.tree(found), expected)
    values, other = (
        each.view(-1, groups, BLOCK).flip(1).reshape(-1, groups * BLOCK)
        for each in (rows.values_MK, weight.values)
    )
    turned = partials(
        Quantised(values, rows.scales_GW.flip(0)),
        Matrix(other, scales.flip(1).to(DEVICE)),
        leaves=1,
    )
    with pytest.raises(AssertionError, match="differ in their bits"):
        assert_same_bits("backwards", turned[0], twin(rows, weight)[0])


TILES = list(
    dict.fromkeys((kind, tile) for kind in Kind for _, each in _SCALED[kind] for tile in each)
)


@pytest.mark.parametrize(("kind", "tile"), TILES, ids=str)
def test_scaled_tiles_fit_shared_memory_and_leaves(kind: Kind, tile: Tile) -> None:
    assert tile.depth == LEAF_UNIT == BLOCK  # a stage has one scale a row
    assert shared_bytes(tile, 1) <= SHARED_BYTES
    shares = tile.warps // 4
    if tile.x_first:
        assert tile.rows % 64 == 0 and shares % (tile.rows // 64) == 0
        assert tile.fold(8, 1) <= 2, "a program stores the sum of a leaf while it adds the other"
    else:
        assert tile.columns == 64 * shares
    width = tile.columns // 2 if kind is Kind.GATED else tile.columns
    assert BLOCK % width == 0 or width == 2 * BLOCK, "outputs of a tile have one block, or two"


@gpu
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize(("kind", "tile"), TILES, ids=str)
def test_scaled_tile_stores_the_bits_of_the_portable_kernel(
    kind: Kind, tile: Tile, ragged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_gated = kind is Kind.GATED
    m, k = 2 * tile.rows + 5, 9 * BLOCK
    n = 3072 if is_gated else 6001 if ragged else 6016
    kernel = in_use(E4M3, torch.device(DEVICE), n if is_gated else 0)
    if kernel != "streaming":
        pytest.skip(kernel)
    from tlt_kernels.gpu import gemm_stream

    parts, fold = {Kind.PARTIALS: (2, 1), Kind.FOLDED: (2, 2)}.get(kind, (1, 1))
    leaf = leaf_size(k, parts * fold) if parts > 1 else k
    weight = matrix(2 * n if is_gated else n, k)
    bias = draw(n, 1, seed=2).view(n) if kind is Kind.LINEAR else None
    given = quantise_rows(draw(m, k)), weight, bias
    dtype = torch.bfloat16 if kind in (Kind.LINEAR, Kind.GATED) else torch.float32
    found = torch.full((parts * m + 1, n), float("nan"), dtype=dtype, device=DEVICE)
    expected = found.clone()
    outs = [out[:-1].view(parts, m, n) for out in (found, expected)]
    stream = LastLaunched(gemm_stream._stream)
    monkeypatch.setattr(gemm_stream, "_stream", stream)
    gemm_stream.multiply(tile, *given, outs[0], leaf, fold, is_gated)
    gemm_portable.multiply(portable_tile(m, E4M3), *given, outs[1], leaf, fold, is_gated)
    assert_same_bits(f"{kind.value}, {tile}", found[:-1], expected[:-1])
    assert found[-1].isnan().all(), "written past the last row"
    assert stream.compiled.metadata.shared <= shared_bytes(tile, 1)
