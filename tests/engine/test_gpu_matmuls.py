"""Matmuls of the fast numerics: with either library, logits are float32 sums without rounding to
another type.
"""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton_tests import DEVICE, assert_close
from tlt_kernels.gpu.quantise import Matrix
from tlt_server.models.gpu.matmuls import FEW_ROWS, FastMatmuls


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
