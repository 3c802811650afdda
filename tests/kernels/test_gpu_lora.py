"""LoRA kernels against their plain twin, and the bits of a row in any company."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton_tests import DEVICE, assert_close, assert_same_bits, gpu
from tlt_kernels import reference
from tlt_kernels.gpu import gemm
from tlt_kernels.gpu.lora import AdapterRows, expand, expand_silu, find_rows, shrink
from tlt_kernels.gpu.quantise import Matrix
from tlt_kernels.gpu.tensors import RowTable

DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=gpu)]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 6e-3}
SLOTS, RANK = 3, 16


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def found(slot_M: list[int]) -> AdapterRows:
    """Return the rows of a step in which row m is of a batch slot with the adapter slot_M[m]."""
    rows = RowTable.allocate(len(slot_M), 1, device=DEVICE)
    ids = torch.arange(len(slot_M), dtype=torch.int32, device=DEVICE)
    rows.position_R.copy_(ids)
    rows.batch_slot_R.copy_(ids)
    by_slot = AdapterRows.allocate(SLOTS, len(slot_M), device=DEVICE)
    find_rows(rows, torch.tensor(slot_M, dtype=torch.int32, device=DEVICE), by_slot)
    return by_slot


def test_live_rows_are_grouped_by_adapter_and_dead_rows_skipped() -> None:
    rows = RowTable.allocate(1500, 1, device=DEVICE)
    batch_slot = torch.randint(0, 5, (1500,), generator=torch.Generator().manual_seed(0))
    dead = torch.rand(1500, generator=torch.Generator().manual_seed(1)) < 0.2
    rows.batch_slot_R.copy_(batch_slot)
    rows.position_R.copy_(torch.where(dead, -1, 7))
    adapter = torch.tensor([2, -1, 0, 2, -1], dtype=torch.int32)
    by_slot = AdapterRows.allocate(SLOTS, 1500, device=DEVICE)
    find_rows(rows, adapter.to(DEVICE), by_slot)
    for slot in range(SLOTS):
        expected = torch.nonzero((adapter[batch_slot] == slot) & ~dead)[:, 0]
        count = int(by_slot.count_S[slot])
        assert by_slot.row_SM[slot, :count].tolist() == expected.tolist()
    rest = torch.nonzero((adapter[batch_slot] == -1) | dead)[:, 0]
    count = int(by_slot.count_S[SLOTS])
    assert by_slot.row_SM[SLOTS, :count].tolist() == rest.tolist()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", [(96,), (64, 32, 32), (48, 48)])
@pytest.mark.parametrize("inputs", [40, 1100])
def test_add_lora_matches_its_twin(inputs: int, parts: tuple[int, ...], dtype: torch.dtype) -> None:
    slot_M = [1, -1, 0, 1] + [2] * 20
    x, out = draw(24, inputs, dtype=dtype), draw(24, sum(parts), dtype=dtype, seed=1)
    a = draw(SLOTS, RANK * len(parts), inputs, dtype=dtype, seed=2)
    b = draw(SLOTS, sum(parts), RANK, dtype=dtype, seed=3)
    scale = torch.tensor([0.5, 2.0, 0.3], device=DEVICE)
    doubles = (each.double() for each in (x, a, b, scale))
    expected = reference.add_lora(*doubles, parts, torch.tensor(slot_M), out.double())
    before = out.clone()
    rows = found(slot_M)
    expand(shrink(x, a, rows), b, scale, parts, rows, out)
    assert_close("sum", out, expected, TOLERANCE[dtype])
    assert_same_bits("a row without an adapter", out[1], before[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_adapter_row_bits_do_not_depend_on_other_rows(dtype: torch.dtype) -> None:
    parts, count = (64, 32, 32), 40
    x = draw(count, 1100, dtype=dtype)
    a, b = draw(SLOTS, 48, 1100, dtype=dtype, seed=2), draw(SLOTS, 128, RANK, dtype=dtype, seed=3)
    scale = torch.tensor([0.5, 2.0, 0.3], device=DEVICE)
    base = draw(count, 128, dtype=dtype, seed=4)
    slot_M = [m % 4 - 1 for m in range(count)]
    together = base.clone()
    rows = found(slot_M)
    expand(shrink(x, a, rows), b, scale, parts, rows, together)
    for m in (0, 1, 2, 3, count - 1):
        alone = base[m : m + 1].clone()
        rows = found([slot_M[m]])
        expand(shrink(x[m : m + 1].contiguous(), a, rows), b, scale, parts, rows, alone)
        assert_same_bits(f"row {m}", alone[0], together[m])


@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_rows_with_and_without_adapters_match_the_twin(dtype: torch.dtype) -> None:
    """Rows without one have the bits of the fused matmul, the others those of its parts."""
    a = draw(SLOTS, 2 * RANK, 160, dtype=dtype, seed=2)
    b = draw(SLOTS, 192, RANK, dtype=dtype, seed=3)
    scale, weight = torch.tensor([0.5, 2.0, 0.3], device=DEVICE), draw(192, 160, dtype=dtype) * 0.2
    for count in (1, 5, 70):
        x, rows = draw(count, 160, dtype=dtype), found([m % 4 - 1 for m in range(count)])
        low, both = shrink(x, a, rows), gemm.linear(x, Matrix(weight), out_dtype=torch.float32)
        gated = expand_silu(low, b, scale, rows, both, dtype)
        assert_same_bits(f"{count} rows", gated[::4], gemm.gated(x, Matrix(weight))[::4])
        expand(low, b, scale, (96, 96), rows, both)
        expected = reference.silu_mul(both.double())
        assert_close(f"{count} rows", gated, expected, TOLERANCE[dtype])
