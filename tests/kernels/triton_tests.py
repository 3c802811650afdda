"""The device of Triton tests: the GPU if there is one, else the CPU interpreter. Import this before
any kernel.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from tlt_kernels.gpu.quantise import Quantised

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

gpu = pytest.mark.gpu


def assert_close(name: str, found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """Check the relative RMS error against the twin; NaN never passes."""
    found, expected = found.double().cpu(), expected.double().cpu()
    error = ((found - expected).norm() / expected.norm().clamp_min(1e-30)).item()
    assert error <= tolerance, f"{name}: relative RMS error {error:.2e} over {tolerance:.0e}"


def assert_same_rows(found: Quantised, expected: Quantised) -> None:
    """Check the values and scales of rows in FP8; scales beyond them are undefined."""
    rows = len(expected.values_MK)
    for mine, other in (
        (found.values_MK.view(torch.uint8), expected.values_MK.view(torch.uint8)),
        (found.scales_GW[:, :rows], expected.scales_GW[:, :rows]),
    ):
        assert torch.equal(mine, other), f"{int((mine != other).sum())} elements differ"


def assert_same_bits(name: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    integers = {torch.float32: torch.int32, torch.bfloat16: torch.int16}
    differing = int(
        (found.view(integers[found.dtype]) != expected.view(integers[expected.dtype])).sum()
    )
    assert differing == 0, f"{name}: {differing} of {found.numel()} elements differ in their bits"
