"""Rotary embedding of q and k, and the KV write, in one pass over the qkv projection's output.

A program handles a few heads of one row: RMSNorm per head if the model has it, halves (d, d + D/2)
rotated in fp32, rounded once. v is copied. A cache in e4m3 gets what the model's type would hold,
quantised with one scale per head. A program lets the next kernel start only after its own
wait, so that kernel (`attend`) may read, before its own wait, everything written before the qkv
projection: the plan of the step and page tables.

Legend: R rows, X = (N + 2 K) D, N query heads, K KV heads, D head width, D2 = D / 2, S KV slots, P
positions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tlt_kernels.gpu.quantise import scale_of, scaled
from tlt_kernels.gpu.target import PDL, pdl_launch, pdl_wait

_HEADS = 16  # heads per program: 3 programs for a row of 28 + 4 + 4 heads


@triton.jit(do_not_specialize=["kv_slots"])
def _rope_store(
    qkv,
    position,
    kv_slot,
    cos,
    sin,
    k_cache,
    v_cache,
    q_out,
    q_weight,
    k_weight,
    k_scales,
    v_scales,
    kv_slots,
    eps,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    D: tl.constexpr = 2 * HALF
    r = tl.program_id(0).to(tl.int64)
    n_B = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    d_H = tl.arange(0, HALF)
    is_q_B, is_v_B = n_B < Q_HEADS, n_B >= Q_HEADS + KV_HEADS
    mask = (n_B < Q_HEADS + 2 * KV_HEADS)[:, None] & (d_H < HALF)[None, :]
    pdl_wait()
    pdl_launch()
    p = tl.maximum(tl.load(position + r), 0)
    s = tl.load(kv_slot + r).to(tl.int64)
    source = qkv + r * (Q_HEADS + 2 * KV_HEADS) * D + n_B[:, None] * D + d_H[None, :]
    low_BH, high_BH = tl.load(source, mask, other=0.0), tl.load(source + HALF, mask, other=0.0)
    x_BH, y_BH = low_BH.to(tl.float32), high_BH.to(tl.float32)
    if Q_NORM or K_NORM:
        mean_B = tl.sum(x_BH * x_BH + y_BH * y_BH, axis=1) / D
        scale_B = 1.0 / tl.sqrt_rn(mean_B + eps)
        normed_B = (is_q_B & Q_NORM) | (~is_q_B & ~is_v_B & K_NORM)
        weight_x_BH = tl.full([BLOCK, HALF], 1.0, tl.float32)
        weight_y_BH = tl.full([BLOCK, HALF], 1.0, tl.float32)
        if Q_NORM:
            weight_x_BH = tl.where(
                is_q_B[:, None], tl.load(q_weight + d_H).to(tl.float32)[None, :], weight_x_BH
            )
            weight_y_BH = tl.where(
                is_q_B[:, None], tl.load(q_weight + HALF + d_H).to(tl.float32)[None, :], weight_y_BH
            )
        if K_NORM:
            weight_x_BH = tl.where(
                is_q_B[:, None], weight_x_BH, tl.load(k_weight + d_H).to(tl.float32)[None, :]
            )
            weight_y_BH = tl.where(
                is_q_B[:, None], weight_y_BH, tl.load(k_weight + HALF + d_H).to(tl.float32)[None, :]
            )
        x_BH = tl.where(normed_B[:, None], x_BH * scale_B[:, None] * weight_x_BH, x_BH)
        y_BH = tl.where(normed_B[:, None], y_BH * scale_B[:, None] * weight_y_BH, y_BH)
    cos_H, sin_H = tl.load(cos + p * HALF + d_H)[None, :], tl.load(sin + p * HALF + d_H)[None, :]
    left_BH = (x_BH * cos_H - y_BH * sin_H).to(low_BH.dtype)
    right_BH = (y_BH * cos_H + x_BH * sin_H).to(low_BH.dtype)
    if Q_HEADS > 0:
        to_q = q_out + r * Q_HEADS * D + n_B[:, None] * D + d_H[None, :]
        tl.store(to_q, left_BH, mask & is_q_B[:, None])
        tl.store(to_q + HALF, right_BH, mask & is_q_B[:, None])
    is_k_B = ~is_q_B & ~is_v_B
    if k_scales is not None:
        left_BH = tl.where(is_v_B[:, None], low_BH, left_BH).to(tl.float32)
        right_BH = tl.where(is_v_B[:, None], high_BH, right_BH).to(tl.float32)
        top_B = tl.max(tl.maximum(tl.abs(left_BH), tl.abs(right_BH)), axis=1)
        # Values that are not finite make the scale NaN, as e4m3 could not show them.
        scale_B = scale_of(top_B) + tl.sum(left_BH * 0.0 + right_BH * 0.0, axis=1)
        to_B = (n_B - Q_HEADS) % KV_HEADS * kv_slots + s
        tl.store(k_scales + to_B, scale_B, is_k_B)
        tl.store(v_scales + to_B, scale_B, is_v_B & (n_B < Q_HEADS + 2 * KV_HEADS))
        left_BH, right_BH = scaled(left_BH, scale_B[:, None]), scaled(right_BH, scale_B[:, None])
        low_BH, high_BH = left_BH, right_BH
    to_k = k_cache + s * KV_HEADS * D + (n_B - Q_HEADS)[:, None] * D + d_H[None, :]
    tl.store(to_k, left_BH, mask & is_k_B[:, None])
    tl.store(to_k + HALF, right_BH, mask & is_k_B[:, None])
    to_v = v_cache + s * KV_HEADS * D + (n_B - Q_HEADS - KV_HEADS)[:, None] * D + d_H[None, :]
    tl.store(to_v, low_BH, mask & is_v_B[:, None])
    tl.store(to_v + HALF, high_BH, mask & is_v_B[:, None])


def rope_store(
    qkv_RX: Tensor,
    position_R: Tensor,
    kv_slot_R: Tensor,
    cos_PD2: Tensor,
    sin_PD2: Tensor,
    k_SKD: Tensor,
    v_SKD: Tensor,
    *,
    heads: int,
    q_weight_D: Tensor | None = None,
    k_weight_D: Tensor | None = None,
    scale_2KS: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Write k and v of row r to kv_slot_R[r]; return the rotated q [R, N, D] in the dtype of
    `qkv_RX`. `heads` 0: qkv has only k and v. `scale_2KS`: the scales of keys and of values, if
    these are e4m3.

    A dead row (position -1) is treated as position 0 and writes to its own KV slot.
    """
    rows, (kv_heads, width) = len(qkv_RX), k_SKD.shape[1:]
    assert qkv_RX.is_contiguous() and k_SKD.is_contiguous() and v_SKD.is_contiguous()
    assert (
        qkv_RX.shape[1] == (heads + 2 * kv_heads) * width
        and cos_PD2.dtype == sin_PD2.dtype == torch.float32
    )
    q_RND = torch.empty((rows, heads, width), dtype=qkv_RX.dtype, device=qkv_RX.device)
    grid = (rows, triton.cdiv(heads + 2 * kv_heads, _HEADS))
    _rope_store[grid](
        qkv_RX,
        position_R,
        kv_slot_R,
        cos_PD2,
        sin_PD2,
        k_SKD,
        v_SKD,
        q_RND,
        qkv_RX if q_weight_D is None else q_weight_D,
        qkv_RX if k_weight_D is None else k_weight_D,
        *((None, None) if scale_2KS is None else scale_2KS),
        len(k_SKD),
        eps,
        Q_HEADS=heads,
        KV_HEADS=kv_heads,
        HALF=width // 2,
        Q_NORM=q_weight_D is not None,
        K_NORM=k_weight_D is not None,
        BLOCK=_HEADS,
        num_warps=4,
        **PDL,
    )
    return q_RND
