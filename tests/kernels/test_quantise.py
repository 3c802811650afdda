"""FP8 of weights and rows: the rule of scales, rounding, and equality of all that quantise."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from tests.kernels.triton_tests import DEVICE, assert_same_rows, gpu
from tlt_client.channels.checksums import mix64
from tlt_client.quantise import QuantisedBlocks, effective, effective_checksum, quantise, scale_of
from tlt_kernels.cpu.elementwise import in_e4m3
from tlt_kernels.gpu.quantise import Matrix, Quantised, quantise_rows

E4M3 = torch.float8_e4m3fn
EVERY_BYTE = torch.arange(256, dtype=torch.uint8)
FINITE = EVERY_BYTE[(EVERY_BYTE & 0x7F) != 0x7F].view(E4M3)


def drawn(rows: int, columns: int, spread: float = 3.0) -> torch.Tensor:
    """Normal values whose blocks and rows have very different sizes."""
    generator = torch.Generator().manual_seed(rows + columns)
    sizes = torch.exp2(spread * torch.randn(rows, 1, generator=generator))
    return (torch.randn(rows, columns, generator=generator) * sizes).bfloat16()


def same(found: QuantisedBlocks, expected: QuantisedBlocks) -> bool:
    return torch.equal(
        found.values_NK.view(torch.uint8), expected.values_NK.view(torch.uint8)
    ) and torch.equal(found.scales_BC, expected.scales_BC)


@pytest.mark.parametrize("shape", [(1, 1), (128, 128), (200, 384), (2100, 130)])
def test_quantising_effective_weights_changes_nothing(shape: tuple[int, int]) -> None:
    first = quantise(drawn(*shape))
    assert same(quantise(effective(first)), first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_pass_by_quantising_unrounded(dtype: torch.dtype) -> None:
    """Gradients in e4m3 would be 0."""
    weight = drawn(200, 384).to(dtype).requires_grad_()
    assert not effective(quantise(weight)).requires_grad
    found = weight + (effective(quantise(weight)) - weight).detach()
    assert torch.equal(found, effective(quantise(weight)).to(dtype))
    (found * 2.0**-20).sum().backward()
    assert weight.grad is not None and bool((weight.grad == 2.0**-20).all())


@pytest.mark.parametrize("top", [464.0, 465.0, 448.0, 232.0, 233.0, 1.0, 2.0**-30, 2.0**30])
def test_scale_is_smallest_power_of_two_under_464(top: float) -> None:
    scale = scale_of(torch.tensor([top])).item()
    assert top / scale <= 464 < top / (scale / 2)
    assert torch.frexp(torch.tensor(scale)).mantissa == 0.5


def test_vanishing_blocks_become_zeros_with_scale_one() -> None:
    for size in (0.0, 2.0**-110, 2.0**-126):
        found = quantise(torch.full((2, 3), size, dtype=torch.bfloat16))
        assert found.scales_BC.tolist() == [[1.0]]
        assert not found.values_NK.float().any()
    least = quantise(torch.full((2, 3), 2.0**-104, dtype=torch.bfloat16))
    assert least.scales_BC.item() == 2.0**-100 and same(quantise(effective(least)), least)


def test_values_are_divided_and_rounded_by_block() -> None:
    weight = drawn(300, 260).float()
    found = quantise(weight)
    for b in range(3):
        for c in range(3):
            block = weight[b * 128 : (b + 1) * 128, c * 128 : (c + 1) * 128]
            scale = found.scales_BC[b, c]
            expected = (block.double() / scale.double()).clamp(-448, 448).to(E4M3)
            part = found.values_NK[b * 128 : (b + 1) * 128, c * 128 : (c + 1) * 128]
            assert torch.equal(part.float(), expected.float())


def test_effective_checksum_is_that_of_a_round_trip() -> None:
    weight = drawn(130, 257)
    live = effective(quantise(weight))
    assert effective_checksum(weight) == mix64(live) == effective_checksum(live)


def test_parts_of_blocks_begin_at_whole_blocks() -> None:
    blocks = quantise(drawn(384, 256))
    part = blocks.narrow(0, 128, 200)
    assert torch.equal(effective(part), effective(blocks)[128:328])
    with pytest.raises(ValueError, match="begins at 64"):
        blocks.narrow(1, 64, 128)


def test_rows_of_a_matrix_keep_their_scales() -> None:
    blocks = quantise(drawn(384, 256))
    part = Matrix(*blocks).rows(128, 300)
    assert part.scales is not None
    assert torch.equal(
        effective(QuantisedBlocks(part.values, part.scales)), effective(blocks)[128:300]
    )


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=gpu)])
def test_rows_have_scales_of_their_own(dtype: torch.dtype) -> None:
    x = drawn(5, 384).to(DEVICE, dtype)
    x[2] = 0.0
    x[3, 130] = 1e4
    found = quantise_rows(x)
    for m in range(5):
        for g in range(3):
            twin = quantise(x[m : m + 1, g * 128 : (g + 1) * 128].cpu())
            own = found.values_MK[m, g * 128 : (g + 1) * 128].cpu()
            assert torch.equal(own.view(torch.uint8), twin.values_NK[0].view(torch.uint8))
            assert found.scales_GW[g, m].item() == twin.scales_BC.item()


def test_rows_of_a_large_step_are_those_of_a_small_one() -> None:
    x = drawn(70, 640).to(DEVICE)
    many = quantise_rows(x)
    for first in (0, 64):
        few = quantise_rows(x[first : first + 6].contiguous())
        rows = slice(first, first + 6)
        assert_same_rows(few, Quantised(many.values_MK[rows], many.scales_GW[:, rows]))


def test_every_e4m3_number_survives_in_a_row() -> None:
    row = torch.cat([FINITE.float(), torch.zeros(2)])
    for scale in (2.0**-30, 1.0, 2.0**7):
        x = (row * scale).view(1, 256).to(DEVICE)
        found = quantise_rows(x)
        assert torch.equal(found.values_MK.float().cpu() * scale, x.cpu())


def test_midpoints_of_subnormals_round_to_even() -> None:
    x = torch.zeros(1, 128)
    x[0, 0] = 448.0
    x[0, 1:18] = torch.arange(17) * 2.0**-10
    found = quantise_rows(x.to(DEVICE)).values_MK.cpu()
    assert torch.equal(found.float(), x.to(E4M3).float())


@pytest.mark.parametrize("exponent", [-126, -112, -104, -30, 0, 7, 120])
def test_cpu_rounds_rows_as_blocks_of_one_row(exponent: int) -> None:
    """The last group may be short."""
    x = drawn(4, 300).float() * 2.0**exponent
    x[1] = 0
    x[2, 5] *= 1e4
    x[3] = torch.linspace(-464, 464, 300) * 2.0**exponent
    found = in_e4m3(x)
    for row, at in product(range(len(x)), range(0, 300, 128)):
        twin = quantise(x[row : row + 1, at : at + 128])
        assert torch.equal(found[row : row + 1, at : at + 128], values_of(twin))
    assert torch.equal(in_e4m3(found), found)
    assert torch.equal(in_e4m3(x[2:3]), found[2:3])


def values_of(blocks: QuantisedBlocks) -> torch.Tensor:
    return blocks.values_NK.float() * blocks.scales_BC


def test_cpu_rounds_to_every_e4m3_number() -> None:
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    values = values[values.isfinite()].view(2, 127)
    found = in_e4m3(values * 2.0**-20)
    assert torch.equal(found, values * 2.0**-20)
    assert in_e4m3(torch.tensor([[1.0, torch.nan]]))[0, 1].isnan()


def test_nan_stays_and_infinity_saturates() -> None:
    x = torch.ones(2, 256, device=DEVICE)
    x[0, 3], x[1, 200] = float("nan"), float("-inf")
    found = quantise_rows(x)
    assert found.values_MK.float().isnan().nonzero().tolist() == [[0, 3]]
    assert found.values_MK[1, 200].float() == -448
