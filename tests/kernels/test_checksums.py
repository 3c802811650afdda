"""Checksums of content: the two kernels and the trainer's own code find one value; and what the
value tells apart.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.triton_tests import DEVICE, gpu

# isort: split
from tlt_client.channels.checksums import finished, mix64
from tlt_kernels.cpu import checksums as cpu
from tlt_kernels.gpu import checksums as on_gpu

TYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)


def by_hand(words: list[int]) -> str:
    mask, total = 2**64 - 1, 0

    def mix(z: int) -> int:
        z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ z >> 27) * 0x94D049BB133111EB) & mask
        return z ^ z >> 31

    for i, word in enumerate(words):
        total += mix((word + (i + 1) * 0x9E3779B97F4A7C15) & mask)
    return f"mix64:{mix((total + len(words)) & mask):016x}"


def test_checksum_equals_its_definition_by_hand():
    assert mix64(torch.tensor([1.0, -2.5, 0.0])) == by_hand([0x3F800000, 0xC0200000, 0])
    assert mix64(torch.tensor([7, -1])) == by_hand([7, 2**64 - 1])
    assert mix64(torch.empty(0)) == by_hand([])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("count", [0, 1, 31, 2048, 70_001])
def test_every_device_computes_the_same_checksum(dtype, count):
    tensor = (torch.randn(count, generator=torch.Generator().manual_seed(count)) * 50).to(dtype)
    for total, finite in (cpu.mixed_sum(tensor), on_gpu.mixed_sum(tensor.to(DEVICE))):
        assert finished(total, count) == mix64(tensor) and finite is bool(tensor.isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("strange", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("at", [0, 2047, 70_000])
def test_checksum_reports_an_infinity_or_a_nan(dtype, strange, at):
    tensor = torch.full((70_001,), torch.finfo(dtype).max, dtype=dtype)
    assert cpu.mixed_sum(tensor)[1]
    assert on_gpu.mixed_sum(tensor.to(DEVICE))[1], "the largest number is one"
    tensor[at] = strange
    assert not cpu.mixed_sum(tensor)[1] and not on_gpu.mixed_sum(tensor.to(DEVICE))[1]


def test_checksum_does_not_depend_on_the_storage_type():
    tensor = torch.randn(1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert (
        mix64(tensor)
        == mix64(tensor.float())
        == mix64(tensor.double())
        == mix64(tensor.view(10, 100))
    )


def changed(tensor: Tensor, how: str, i: int, j: int) -> Tensor:
    copy = tensor.clone()
    if how == "bit":
        copy.view(torch.int16)[i] ^= 1 << j % 16
    elif how == "swap":
        copy[i], copy[j] = tensor[j], tensor[i]
    elif how == "cut":
        copy = copy[:-1]
    elif how == "longer":
        copy = torch.cat([copy, copy.new_zeros(1)])
    elif how == "moved":
        copy = copy.roll(1)
    return copy


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(["bit", "swap", "cut", "longer", "moved"]),
    st.integers(0, 499),
    st.integers(0, 499),
    st.integers(0, 10),
)
def test_different_contents_have_different_checksums(how, i, j, seed):
    tensor = torch.randn(500, generator=torch.Generator().manual_seed(seed)).bfloat16()
    other = changed(tensor, how, i, j)
    same = len(other) == len(tensor) and torch.equal(
        other.view(torch.int16), tensor.view(torch.int16)
    )
    assert (mix64(other) == mix64(tensor)) == same


def test_several_tensors_are_checksummed_at_once():
    tensors = [torch.randn(n, generator=torch.Generator().manual_seed(n)) for n in (3, 0, 40_000)]
    tensors[2][7] = float("inf")
    expected = [cpu.mixed_sum(tensor) for tensor in tensors]
    assert cpu.mixed_sums(tensors) == expected
    assert on_gpu.mixed_sums([tensor.to(DEVICE) for tensor in tensors]) == expected
    assert [finite for _, finite in expected] == [True, True, False]
    assert on_gpu.mixed_sums([]) == cpu.mixed_sums([]) == []


def test_complex_numbers_have_no_checksum():
    with pytest.raises(TypeError, match="complex64"):
        mix64(torch.zeros(3, dtype=torch.complex64))


@gpu
def test_large_tensor_is_checksummed_at_read_bandwidth():
    tensor = torch.randn(1 << 28, device="cuda", dtype=torch.bfloat16)
    on_gpu.mixed_sum(tensor)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    on_gpu.mixed_sum(tensor)
    end.record()
    end.synchronize()
    assert tensor.nbytes / begin.elapsed_time(end) * 1e3 > 2e11, "under 200 GB/s"
