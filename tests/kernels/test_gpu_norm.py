"""Norm kernels against their plain twins and, on a GPU, the bits of a row in any company."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton_tests import DEVICE, assert_close, assert_same_bits, assert_same_rows, gpu
from tlt_kernels import reference
from tlt_kernels.gpu.norm import (
    add,
    add_rms_norm,
    add_rms_norm_into,
    embed_beside,
    embed_norms,
    embed_rms_norm,
    rms_norm,
)
from tlt_kernels.gpu.quantise import Rows, empty_rows, quantise_rows

DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=gpu)]
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 3e-3}  # one rounding of the result
EPS = 1e-6


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [32, 160, 257])
def test_rms_norm_matches_its_twin(hidden: int, dtype: torch.dtype) -> None:
    x, weight = draw(5, hidden, dtype=dtype), draw(hidden, dtype=dtype)
    out = torch.full_like(x, float("nan"))
    assert rms_norm(x, weight, EPS, out) is out
    assert_close(
        "normed", out, reference.rms_norm(x.double(), weight.double(), EPS), TOLERANCE[dtype]
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("parts", [1, 3])
def test_add_rms_norm_adds_parts_bias_and_residual(
    parts: int, biased: bool, dtype: torch.dtype
) -> None:
    part, residual, weight = draw(parts, 3, 160), draw(3, 160, seed=1), draw(160, dtype=dtype)
    bias = draw(160, dtype=dtype, seed=2) if biased else None
    expected_residual = (
        residual.double() + part.double().sum(0) + (bias.double() if bias is not None else 0.0)
    )
    normed = add_rms_norm(part, residual, weight, EPS, bias_H=bias)
    assert normed.dtype == dtype
    assert_close("residual", residual, expected_residual, 1e-6)
    assert_close(
        "normed",
        normed,
        reference.rms_norm(expected_residual, weight.double(), EPS),
        TOLERANCE[dtype],
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_embeddings_are_looked_up_clamped_and_normed(dtype: torch.dtype) -> None:
    token = torch.tensor([3, -1, 11, 99, 0], dtype=torch.int32, device=DEVICE)
    known = torch.tensor([3, 0, 11, 11, 0], device=DEVICE)
    embedding = draw(12, 160, dtype=dtype)
    weight = draw(160, dtype=dtype)
    feature_weight = draw(160, dtype=dtype, seed=3)
    normed = torch.empty(len(token), embedding.shape[1], dtype=weight.dtype, device=DEVICE)
    residual = embed_rms_norm(token, embedding, weight, EPS, normed)
    assert_close("residual", residual, embedding[known], 0.0)
    assert_close(
        "normed",
        normed,
        reference.rms_norm(embedding[known].double(), weight.double(), EPS),
        TOLERANCE[dtype],
    )
    for g in (
        draw(5, 160, dtype=dtype, seed=4),
        draw(5, 160, seed=4),
    ):  # a target's fused feature, and the hint of a draft row
        both = torch.empty(5, 320, dtype=dtype, device=DEVICE)
        embed_norms(token, embedding, weight, g, feature_weight, EPS, both)
        assert_close("embedding half", both[:, :160], normed, 1e-12)
        assert_close(
            "feature half",
            both[:, 160:],
            reference.rms_norm(g.double(), feature_weight.double(), EPS),
            TOLERANCE[dtype],
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_norm_weights_halves_are_copied_and_sums_rounded(dtype: torch.dtype) -> None:
    token = torch.tensor([3, -1, 11, 99, 0], dtype=torch.int32, device=DEVICE)
    known = torch.tensor([3, 0, 11, 11, 0], device=DEVICE)
    embedding, g = draw(12, 160, dtype=dtype), draw(5, 160, seed=4)
    both = embed_beside(token, embedding, g)
    assert_same_bits("both halves", both, torch.cat([embedding[known], g.to(dtype)], dim=1))
    part, residual = draw(3, 5, 160), draw(5, 160, seed=1)
    expected = residual + ((part[0] + part[1]) + part[2])
    assert_same_bits("sum", add(part, residual, dtype), expected.to(dtype))
    assert_same_bits("residual", residual, expected)


def test_norm_of_no_rows_launches_no_kernel() -> None:
    weight = draw(32)
    assert add_rms_norm(draw(2, 0, 32), draw(0, 32), weight, EPS).shape == (0, 32)
    token = torch.zeros(0, dtype=torch.int32, device=DEVICE)
    assert embed_rms_norm(token, draw(4, 32), weight, EPS, draw(0, 32)).shape == (0, 32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [128, 384])
def test_quantised_norms_are_those_of_rounded_rows(hidden: int, dtype: torch.dtype) -> None:
    token = torch.tensor([3, 11, 0], dtype=torch.int32, device=DEVICE)
    embedding, weight = draw(12, hidden, dtype=dtype), draw(hidden, dtype=dtype, seed=1)
    weight[:128] *= 1e4
    part, residual = draw(3, 3, hidden), draw(3, hidden, seed=2)

    def embedded(out: Rows) -> Rows:
        embed_rms_norm(token, embedding, weight, EPS, out)
        return out

    def joined(out: Rows) -> Rows:
        return embed_norms(token, embedding, weight, residual, weight, EPS, out)

    def added(out: Rows) -> Rows:
        return add_rms_norm_into(out, part, residual.clone(), weight, EPS)

    for compute, width in ((embedded, hidden), (joined, 2 * hidden), (added, hidden)):
        rows = compute(torch.empty(3, width, dtype=dtype, device=DEVICE))
        assert_same_rows(compute(empty_rows(3, width, rows.device)), quantise_rows(rows))


@gpu
@pytest.mark.parametrize("hidden", [3584, 256])
def test_bits_of_a_row_do_not_depend_on_the_other_rows(hidden: int) -> None:
    part = draw(4, 300, hidden)
    residual = draw(300, hidden)
    weight = draw(hidden, dtype=torch.bfloat16)
    added = (part[0] + part[1]) + (part[2] + part[3])
    whole_residual = residual.clone()
    whole = add_rms_norm(part, whole_residual, weight, EPS)
    for rows in (1, 7, 300):
        few_residual = residual[:rows].clone()
        assert_same_bits(
            f"normed of {rows}",
            add_rms_norm(part[:, :rows].contiguous(), few_residual, weight, EPS),
            whole[:rows],
        )
        assert_same_bits(f"residual of {rows}", few_residual, whole_residual[:rows])
        few_residual = residual[:rows].clone()
        assert_same_bits(
            f"already added, {rows}",
            add_rms_norm(added[None, :rows], few_residual, weight, EPS),
            whole[:rows],
        )
