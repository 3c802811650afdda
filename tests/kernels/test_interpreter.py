"""Properties of Triton's CPU interpreter that the kernels' bit tests rely on, with the short cuts
that tests give it.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from tests.kernels.triton_tests import DEVICE


def matmul(*operands: np.ndarray) -> np.ndarray:
    a, b, acc = (interpreter.TensorHandle(each, tl.float32) for each in operands)
    return interpreter.interpreter_builder.create_dot(a, b, acc, "ieee", 0).data


@pytest.mark.skipif(DEVICE != "cpu", reason="nothing is interpreted on a GPU")
def test_matmul_bits_do_not_depend_on_the_position_in_a_tile() -> None:
    draw, differing = np.random.default_rng(0), []
    for inner in (16, 80, 256):
        shapes = (128, inner), (inner, 64), (128, 64)
        left, right, acc = (draw.standard_normal(shape).astype(np.float32) for shape in shapes)
        ascending = np.zeros_like(acc)
        for k in range(inner):
            ascending += left[:, k, None] * right[k]
        ascending += acc
        for name, matrix in (("rows", right), ("columns", np.ascontiguousarray(right.T).T)):
            for rows, columns in product((1, 3, 16, 128), (1, 5, 16, 64)):
                m, n = slice(128 - rows, None), slice(64 - columns, None)
                found = matmul(left[m], matrix[:, n], acc[m, n])
                if not np.array_equal(found, ascending[m, n]):
                    differing.append((inner, rows, columns, name))
    assert not differing, f"(inner, rows, columns, order in memory): {differing}"


@triton.jit
def _mixed(whole_N, real_N, out_2N, N: tl.constexpr, ROWS: tl.constexpr):
    n_N = tl.arange(0, N)
    row_R = tl.arange(0, ROWS)[:, None]
    whole = tl.load(whole_N + n_N[None, :], mask=(n_N < N - 1)[None, :] & (row_R >= 0), other=7)
    real = tl.load(real_N + n_N)
    mixed = (whole * 3 - row_R + (whole ^ 5)) * real + 0.5 * real - row_R.to(tl.float32)
    kept = ((whole == 7) | (whole > 2)) & (real[None, :] != 0.0)
    tl.store(out_2N + row_R * N + n_N[None, :], tl.where(kept, mixed, 1 + mixed))


@pytest.mark.skipif(DEVICE != "cpu", reason="nothing is interpreted on a GPU")
def test_interpreted_operations_equal_numpy() -> None:
    draw = np.random.default_rng(1)
    whole_N = draw.integers(-9, 9, 16, np.int32)
    real_N = np.round(draw.standard_normal(16), 1).astype(np.float32)
    real_N[3] = 0.0
    out_2N = torch.zeros(2, 16)
    _mixed[(1,)](torch.from_numpy(whole_N), torch.from_numpy(real_N), out_2N, N=16, ROWS=2)
    read_N = np.where(np.arange(16) < 15, whole_N, np.int32(7))
    row_R1 = np.arange(2, dtype=np.int32)[:, None]
    whole_2N = (read_N * 3 - row_R1 + (read_N ^ 5)).astype(np.float32)
    mixed_2N = whole_2N * real_N + np.float32(0.5) * real_N - row_R1.astype(np.float32)
    kept_2N = ((read_N == 7) | (read_N > 2)) & (real_N != 0)
    expected = np.where(kept_2N, mixed_2N, np.float32(1) + mixed_2N)
    assert np.array_equal(out_2N.numpy(), expected)
