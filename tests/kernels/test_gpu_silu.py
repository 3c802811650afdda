"""silu against float64: the formula on the interpreter, the PTX text on a GPU."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from tests.kernels.triton_tests import DEVICE, assert_same_bits
from tlt_kernels.gpu.silu import silu

LOWEST = -87.0  # above it 1 + e^-x has a normal reciprocal in float32


@triton.jit
def _silu(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, silu(tl.load(x + i, i < n, 0.0)), i < n)


def run(x_N: torch.Tensor) -> torch.Tensor:
    x_N = x_N.to(DEVICE)
    out_N = torch.full_like(x_N, float("nan"))
    _silu[(triton.cdiv(len(x_N), 1024),)](x_N, out_N, len(x_N), BLOCK=1024)
    return out_N.cpu()


def test_silu_is_within_a_few_ulp_of_the_exact_value() -> None:
    """Measure in units of 2^-23: half from each rounding of the sum and the product, 2 from ex2, 1
    from rcp, and |x| because -x log2 e and its factor are rounded, which moves e^-x by a relative
    error proportional to |x|.
    """
    small = torch.logspace(-30, 0, 20_000, dtype=torch.float64).float()
    x = torch.cat(
        [torch.linspace(LOWEST, 100, 200_000), small, -small, torch.linspace(1e3, 3e38, 100)]
    )
    exact = x.double() * torch.sigmoid(x.double())
    error = ((run(x).double() - exact) / exact).abs() / (x.double().abs().clamp_max(90) + 5) * 2**23
    assert error.max() <= 1, f"{error.max():.2f} of what is allowed, at x = {x[error.argmax()]}"


@pytest.mark.filterwarnings("ignore:overflow")  # the interpreter's e^-x
def test_silu_fades_to_minus_zero_without_nan() -> None:
    x = torch.cat([torch.linspace(LOWEST, -110, 10_000), torch.tensor([-128.0, -1e3, -3e38])])
    found, exact = run(x), x.double() * torch.sigmoid(x.double())
    assert torch.signbit(found).all()
    assert (
        (found.double() - exact).abs() <= 110 * 2.0**-126
    ).all()  # a reciprocal below 2^-126 may be taken for 0


# The interpreter's -inf / (1 + inf)
@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
def test_silu_is_correct_at_zero_infinity_nan_and_denormals() -> None:
    x = torch.tensor([0.0, -0.0, float("inf")])
    assert_same_bits("0, -0 and infinity", run(x), x)
    # As torch has it: -inf / (1 + inf)
    assert run(torch.tensor([float("nan"), float("-inf")])).isnan().all()
    assert torch.nn.functional.silu(torch.tensor(float("-inf"))).isnan()
    denormal = torch.tensor([1e-39, -1e-39, 1e-44])
    assert ((run(denormal) - denormal / 2).abs() <= 2.0**-149).all()
