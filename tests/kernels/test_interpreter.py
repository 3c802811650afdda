"""The property of Triton's CPU interpreter that the kernels' bit tests rely on."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.triton_tests import DEVICE


@pytest.mark.skipif(DEVICE != "cpu", reason="nothing is interpreted on a GPU")
def test_a_row_of_numpys_matmul_has_the_same_bits_for_any_number_of_rows() -> None:
    draw = np.random.default_rng(0)
    differing = []
    for inner in (16, 32, 64, 80, 128, 256):
        for columns in (16, 32, 64, 128):
            left = draw.standard_normal((128, inner)).astype(np.float32)
            right = draw.standard_normal((inner, columns)).astype(np.float32)
            for name, matrix in (("rows", right), ("columns", np.ascontiguousarray(right.T).T)):
                whole = left @ matrix
                differing += [
                    (inner, columns, rows, name)
                    for rows in (16, 32, 64)
                    if not np.array_equal(left[:rows] @ matrix, whole[:rows])
                ]
    assert not differing, f"(inner, columns, rows, order in memory): {differing}"
