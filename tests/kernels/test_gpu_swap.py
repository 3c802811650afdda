"""Contents change places, bit for bit, and nothing beside them is touched."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton_tests import DEVICE, gpu

# isort: split
from benchmarks.graph_time import microseconds
from tlt_kernels.gpu import swap as module
from tlt_kernels.gpu.swap import swap

MARGIN = 8  # elements around


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int32, torch.int64, torch.uint8])
@pytest.mark.parametrize("count", [0, 1, 31, 4096, 10_001])
def test_contents_change_places(dtype: torch.dtype, count: int) -> None:
    width, generator = torch.empty(0, dtype=dtype).element_size(), torch.Generator().manual_seed(count)
    raw = [torch.randint(0, 256, ((count + 2 * MARGIN) * width,), dtype=torch.uint8, generator=generator).to(DEVICE) for _ in range(2)]
    before = [tensor.clone() for tensor in raw]  # of random bytes, some are NaNs with a payload
    swap(*(tensor.view(dtype)[MARGIN : MARGIN + count] for tensor in raw))
    inside = slice(MARGIN * width, (MARGIN + count) * width)
    before[0][inside], before[1][inside] = before[1][inside].clone(), before[0][inside].clone()
    assert all(torch.equal(tensor, expected) for tensor, expected in zip(raw, before, strict=True))


def test_what_does_not_match_is_refused() -> None:
    with pytest.raises(AssertionError):
        swap(torch.zeros(4, device=DEVICE), torch.zeros(5, device=DEVICE))
    with pytest.raises(AssertionError):
        swap(torch.zeros(4, 2, device=DEVICE)[:, 0], torch.zeros(4, device=DEVICE))


@pytest.mark.parametrize("offset", [0, 1])
def test_large_tensors_go_in_several_launches(offset: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST", 64)
    one, other = (torch.arange(start, start + 200, device=DEVICE)[offset:].view(-1, 1) for start in (0, 1000))
    values = one.clone(), other.clone()
    swap(one, other)
    assert torch.equal(one, values[1]) and torch.equal(other, values[0])


@gpu
@pytest.mark.parametrize("more", [0, 8, 1])  # not a multiple of what a program or a vector moves
def test_large_tensors_change_places_near_the_bandwidth_limit(more: int) -> None:
    one, other = (torch.randn((1 << 29) + more, device="cuda").bfloat16() for _ in range(2))
    us = microseconds(lambda: swap(one, other))
    assert 4 * one.nbytes / us / 1e6 > 3.2, "under 3.2 TB/s of reads and writes"
