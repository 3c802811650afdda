"""Swap of contents, bit for bit: nothing around the tensors is touched."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton_tests import DEVICE, gpu

# isort: split
from tlt_kernels.gpu import swap as module
from tlt_kernels.gpu.swap import swap
from tlt_server.bench.micro import captured, in_turns

MARGIN = 8  # elements around


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float32, torch.int32, torch.int64, torch.uint8]
)
@pytest.mark.parametrize("count", [0, 1, 31, 4096, 10_001])
def test_swap_exchanges_tensor_contents(dtype: torch.dtype, count: int) -> None:
    width = torch.empty(0, dtype=dtype).element_size()
    generator = torch.Generator().manual_seed(count)
    raw = [
        torch.randint(
            0, 256, ((count + 2 * MARGIN) * width,), dtype=torch.uint8, generator=generator
        ).to(DEVICE)
        for _ in range(2)
    ]
    before = [tensor.clone() for tensor in raw]  # random bytes: some are NaNs with a payload
    one, other = (tensor.view(dtype)[MARGIN : MARGIN + count] for tensor in raw)
    swap([(one, other)])
    inside = slice(MARGIN * width, (MARGIN + count) * width)
    before[0][inside], before[1][inside] = before[1][inside].clone(), before[0][inside].clone()
    assert all(torch.equal(tensor, expected) for tensor, expected in zip(raw, before, strict=True))


def test_tensors_of_unequal_shape_or_layout_are_refused() -> None:
    with pytest.raises(AssertionError):
        swap([(torch.zeros(4, device=DEVICE), torch.zeros(5, device=DEVICE))])
    with pytest.raises(AssertionError):
        swap([(torch.zeros(4, 2, device=DEVICE)[:, 0], torch.zeros(4, device=DEVICE))])


def test_swap_exchanges_several_pairs() -> None:
    counts = (1 << 20, 0, 33, 1 << 22, 7)
    pairs = [
        (torch.arange(count, device=DEVICE) + i, torch.arange(count, device=DEVICE) * 3 - i)
        for i, count in enumerate(counts)
    ]
    swap(pairs)
    swap(pairs[1:])
    for i, (one, other) in enumerate(pairs):
        k = torch.arange(counts[i], device=DEVICE)
        first, second = (k * 3 - i, k + i) if i == 0 else (k + i, k * 3 - i)
        assert torch.equal(one, first) and torch.equal(other, second)


@pytest.mark.skipif(
    DEVICE == "cuda", reason="what a kernel does in turn is seen by the interpreter"
)
def test_kernel_chain_overlaps_no_earlier_or_later_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the order: the first kernel lets the second start only after its own wait, the last
    lets nothing start early, and each ends after the one before.
    """
    did: list[str] = []
    monkeypatch.setattr(module, "pdl_launch", lambda: did.append("launch"))
    monkeypatch.setattr(module, "pdl_wait", lambda: did.append("wait"))
    pairs = [
        (torch.arange(count, device=DEVICE), torch.zeros(count, dtype=torch.int64, device=DEVICE))
        for count in (0, 3, 4, 0, 5, 0)
    ]
    swap(pairs)
    assert did == ["wait", "launch", "wait"] + ["launch", "wait"] + ["wait"]
    did.clear()
    swap(pairs[:2])
    assert did == ["wait", "wait"], "one alone"


@gpu
@pytest.mark.parametrize("more", [0, 8, 1])  # not a multiple of what a program or a vector moves
def test_large_tensors_are_exchanged_near_the_bandwidth_limit(more: int) -> None:
    one, other = (torch.randn((1 << 29) + more, device="cuda").bfloat16() for _ in range(2))
    ms = in_turns({"it": captured(lambda: swap([(one, other)]))})["it"]
    assert 4 * one.nbytes / ms / 1e9 > 3.2, "under 3.2 TB/s of reads and writes"
