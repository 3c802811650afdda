"""silu(gate) * up of rows that hold both, gate first: what the library's matmuls, which cannot do
it themselves, are measured with.

Legend: R rows, I intermediate.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tlt_kernels.gpu.silu import silu
from tlt_kernels.gpu.target import PDL, pdl_launch, pdl_wait

_BLOCK = 1024


@triton.jit
def _silu_mul(gate_up_ptr, out_ptr, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    pdl_launch()
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < width
    pdl_wait()
    gate = tl.load(gate_up_ptr + row * 2 * width + i, inside, 0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * width + width + i, inside, 0.0).to(tl.float32)
    tl.store(out_ptr + row * width + i, (silu(gate) * up).to(out_ptr.dtype.element_ty), inside)


def silu_mul(gate_up_RX: Tensor) -> Tensor:
    """[R, 2I] -> [R, I] in the same dtype; the arithmetic is fp32."""
    rows, width = len(gate_up_RX), gate_up_RX.shape[1] // 2
    out_RI = torch.empty(rows, width, dtype=gate_up_RX.dtype, device=gate_up_RX.device)
    _silu_mul[(rows, triton.cdiv(width, _BLOCK))](gate_up_RX, out_RI, width, BLOCK=_BLOCK, **PDL)
    return out_RI
