"""Keys and values of one head as attention reads them: in the model's type, or e4m3 times a scale.

A KV slot in e4m3 has one scale per head for keys and one for values. Scales are powers of two, so
the product is exact in bfloat16, and attention has the bits that it has over a cache of products.

Legend: T keys of a block, D head width, K KV heads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tlt_kernels.gpu.target import INTERPRETED


def stored(cache_SKD: Tensor) -> Tensor:
    """Return keys or values as kernels take them: e4m3 as bytes."""
    return cache_SKD.view(torch.uint8) if cache_SKD.element_size() == 1 else cache_SKD


@triton.jit
def load_heads(head, scales, kv_slot_T, inside_T, KV_HEADS: tl.constexpr, D: tl.constexpr, dtype):
    """Return keys or values [T, D] of a head; 0 where not `inside_T`, which may be None. `scales`:
    of the head, None without e4m3.
    """
    at_TD = kv_slot_T.to(tl.int64)[:, None] * (KV_HEADS * D) + tl.arange(0, D)[None, :]
    if inside_T is None:
        found_TD = tl.load(head + at_TD)
    else:
        found_TD = tl.load(head + at_TD, inside_T[:, None], other=0.0)
    if scales is not None:
        if inside_T is None:
            scale_T = tl.load(scales + kv_slot_T)
        else:
            scale_T = tl.load(scales + kv_slot_T, inside_T, other=0.0)
        found_TD = _product(found_TD, scale_T, dtype)
    return found_TD


@triton.jit
def scales_of(scales, at):
    """Return the address of a head's scales; None without scales."""
    if scales is None:
        found = None
    else:
        found = scales + at
    return found


@triton.jit
def _product(byte_TD, scale_T, dtype):
    """Return e4m3 numbers times the scales of their keys. Shifted into place, a number's bits are
    those of 2^-120 times it, subnormals included. In bfloat16 scales above 2^7 give infinity or
    NaN, which a step reports.
    """
    unit = 1.329227995784916e36  # 2^120
    if dtype == tl.bfloat16 and not INTERPRETED:
        scale_TD = (scale_T * unit).to(tl.bfloat16)[:, None].broadcast_to(byte_TD.shape)
        # Impure, because the compiler gives operands that it can trace to bytes an order of its own
        # in the matrix units, and another one in tiles of other heights.
        found_TD = tl.inline_asm_elementwise(
            """{
            .reg .b32 low, high;
            prmt.b32 low, $2, 0, 0x9180;
            shl.b32 low, low, 4;
            and.b32 low, low, 0x87F087F0;
            mul.rn.bf16x2 $0, low, $3;
            prmt.b32 high, $2, 0, 0xB3A2;
            shl.b32 high, high, 4;
            and.b32 high, high, 0x87F087F0;
            mul.rn.bf16x2 $1, high, $4;
            }""",
            "=r,=r,r,r,r",
            [byte_TD, scale_TD],
            dtype=tl.bfloat16,
            is_pure=False,
            pack=4,
        )
    else:
        byte_TD = byte_TD.to(tl.int32)
        bits_TD = ((byte_TD & 0x80) << 24) | ((byte_TD & 0x7F) << 20)
        found_TD = (bits_TD.to(tl.float32, bitcast=True) * unit * scale_T[:, None]).to(dtype)
    return found_TD
