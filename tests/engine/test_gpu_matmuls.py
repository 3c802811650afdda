"""Matmuls of the fast numerics: with either library, logits are float32 sums without rounding to
another type.
"""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton_tests import DEVICE, assert_close, assert_same_bits, gpu
from tlt_client.quantise import QuantisedBlocks, effective, quantise
from tlt_kernels.gpu.quantise import Matrix, quantise_rows
from tlt_server.models.gpu import matmuls
from tlt_server.models.gpu.matmuls import FEW_ROWS, FastMatmuls, StrictMatmuls, has_block_scales


@pytest.mark.parametrize("rows", [FEW_ROWS, FEW_ROWS + 1])
def test_logits_stay_in_float32(rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (
        torch.randn(count, 64, generator=generator).to(DEVICE, torch.bfloat16)
        for count in (rows, 96)
    )
    logits = FastMatmuls.linear(x, Matrix(weight), out_dtype=torch.float32)
    assert logits.dtype == torch.float32
    assert_close("logits", logits, x.double() @ weight.double().T, 1e-6)


def test_matmuls_other_than_logits_keep_their_input_dtype() -> None:
    x = torch.randn(FEW_ROWS + 1, 16, device=DEVICE, dtype=torch.bfloat16)
    weight = torch.randn(8, 16, device=DEVICE, dtype=torch.bfloat16)
    assert FastMatmuls.linear(x, Matrix(weight)).dtype == torch.bfloat16


def drawn(rows: int, outputs: int, inputs: int) -> tuple[torch.Tensor, QuantisedBlocks]:
    generator = torch.Generator().manual_seed(rows)
    x, weight = (
        torch.randn(count, inputs, generator=generator).to(DEVICE, torch.bfloat16)
        for count in (rows, outputs)
    )
    return x, quantise(weight)


def test_library_multiplies_fp8_by_the_same_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's layouts: scales of rows without padding, those of weights in fours."""
    x, blocks = drawn(68, 256, 384)
    bias_N = torch.ones(256, dtype=torch.bfloat16, device=DEVICE)

    def scaled_mm(x_MK, weight_KN, row_scales, _, scales, kind, *, bias, output_dtype):
        assert row_scales.shape == (68, 3) and row_scales.stride() == (1, 68)
        assert scales.shape == (4, 2) and scales.stride() == (1, 4)
        wide_MK = x_MK.float() * row_scales.repeat_interleave(128, 1)
        weight_NK = effective(QuantisedBlocks(weight_KN.T, scales[:3].T.contiguous())).float()
        found_MN = (wide_MK @ weight_NK.T).to(output_dtype)
        return found_MN if bias is None else found_MN + bias

    monkeypatch.setattr(matmuls.functional, "scaled_mm", scaled_mm, raising=False)
    monkeypatch.setattr(matmuls, "has_block_scales", lambda device: True)
    rows, weight = quantise_rows(x), Matrix(*blocks)
    for found, expected in (
        (FastMatmuls.linear(rows, weight, bias_N), StrictMatmuls.linear(rows, weight, bias_N)),
        (FastMatmuls.linear(x, weight), StrictMatmuls.linear(rows, weight)),
        (FastMatmuls().partials(rows, weight)[0], StrictMatmuls().partials(rows, weight).sum(0)),
    ):
        assert found.dtype == torch.bfloat16
        assert_close("library", found, expected, 6e-3)  # two roundings to bfloat16


@pytest.mark.parametrize("rows", [8, 70, 68])
def test_own_kernels_multiply_fp8_that_the_library_cannot(rows: int) -> None:
    """Few rows, a number of rows that the library does not take, or a library without the form."""
    if rows == 68 and DEVICE == "cuda" and has_block_scales(torch.device(DEVICE)):
        pytest.skip("the library can")
    x, blocks = drawn(rows, 128, 256)
    found, expected = (each.linear(x, Matrix(*blocks)) for each in (FastMatmuls, StrictMatmuls))
    assert_same_bits("linear", found, expected)


@gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
@pytest.mark.parametrize("inputs", [896, 3584])
def test_library_on_a_gpu_is_near_the_own_kernels(inputs: int) -> None:
    if not has_block_scales(torch.device("cuda", torch.cuda.current_device())):
        pytest.skip("this library multiplies with no scales of blocks")
    x, blocks = drawn(256, 1024, inputs)
    bias_N = torch.ones(1024, dtype=torch.bfloat16, device=DEVICE)
    found, expected = (
        each.linear(quantise_rows(x), Matrix(*blocks), bias_N)
        for each in (FastMatmuls, StrictMatmuls)
    )
    assert_close("linear", found, expected, 6e-3)
