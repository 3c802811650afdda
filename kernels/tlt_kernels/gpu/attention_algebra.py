"""The definition of an attention output, bit for bit: splits at fixed absolute positions, and one
left fold over them.

Keys are cut into splits whose bounds are the same for every row. Inside a split an online softmax
takes blocks of 64 keys in ascending order; splits are folded in ascending order onto (LOWEST, 0,
0). Every step is per row: a maximum, a sum of products on the matrix units, or one explicit fused
multiply-add. So the bits of a row do not depend on the tile that it shares. A block or split of
which a row sees nothing changes no bit of it. Splits grow with position: short ones give a short
context many programs, long ones keep the fold of a long context short.

Legend: M queries of a tile, T keys of a block, D head width, L lanes that all hold the same sum
(the narrowest matmul). `scale` is the softmax scale times log2(e); tops are maxima of unscaled
scores.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tlt_kernels.gpu.target import dot

BLOCK = tl.constexpr(64)
LANES = tl.constexpr(8)
LOWEST = tl.constexpr(-1.0e30)  # the maximum over no keys


@triton.jit
def split_of(p):
    """Return the index of the split that holds position p: splits have 128 keys below 1024, 256
    below 3072, and 512 above.
    """
    return tl.where(p < 1024, p // 128, tl.where(p < 3072, p // 256 + 4, p // 512 + 10))


@triton.jit
def split_start(s):
    return tl.where(s < 8, s * 128, tl.where(s < 16, s * 256 - 1024, s * 512 - 5120))


@triton.jit
def starts_split(p):
    return p % tl.where(p < 1024, 128, tl.where(p < 3072, 256, 512)) == 0


def split_count(keys: int) -> int:
    """Return the number of splits of a context of `keys` keys."""
    last = keys - 1
    return 1 + (
        last // 128 if last < 1024 else last // 256 + 4 if last < 3072 else last // 512 + 10
    )


@triton.jit
def nothing(M: tl.constexpr, D: tl.constexpr):
    """Return (top_M, sum_ML, acc_MD) over no keys."""
    return (
        tl.full([M], LOWEST, tl.float32),
        tl.zeros([M, LANES], tl.float32),
        tl.zeros([M, D], tl.float32),
    )


@triton.jit
def extend(q_MD, k_TD, v_TD, visible, top_M, sum_ML, acc_MD, scale):
    """Add the next block of a split. `visible` broadcasts to [M, T], or is None where every query
    sees every key.
    """
    score_MT = dot(q_MD, tl.trans(k_TD), tl.zeros([q_MD.shape[0], k_TD.shape[0]], tl.float32))
    if visible is not None:
        score_MT = tl.where(visible, score_MT, float("-inf"))
    best_M = tl.maximum(top_M, tl.max(score_MT, axis=1))
    decay_M = tl.exp2((top_M - best_M) * scale)
    weight_MT = tl.exp2(
        tl.fma(
            score_MT,
            tl.zeros_like(score_MT) + scale,
            -(best_M * scale)[:, None] + tl.zeros_like(score_MT),
        )
    )
    weight_MT = weight_MT.to(v_TD.dtype)
    ones_TL = tl.full([k_TD.shape[0], LANES], 1.0, v_TD.dtype)
    return (
        best_M,
        dot(weight_MT, ones_TL, sum_ML * decay_M[:, None]),
        dot(weight_MT, v_TD, acc_MD * decay_M[:, None]),
    )


@triton.jit
def fold(top_M, sum_ML, acc_MD, next_top_M, next_sum_ML, next_acc_MD, scale):
    """Add one more split to the fold's state."""
    best_M = tl.maximum(top_M, next_top_M)
    old_M, new_M = tl.exp2((top_M - best_M) * scale), tl.exp2((next_top_M - best_M) * scale)
    return (
        best_M,
        scaled_sum(next_sum_ML, new_M, sum_ML, old_M),
        scaled_sum(next_acc_MD, new_M, acc_MD, old_M),
    )


@triton.jit
def scaled_sum(next_MX, new_M, total_MX, old_M):
    return tl.fma(next_MX, new_M[:, None] + tl.zeros_like(next_MX), total_MX * old_M[:, None])


@triton.jit
def quotient(sum_ML, acc_MD):
    """Return the output: 0 where nothing was visible, and never a negative zero."""
    sum_M = tl.max(sum_ML, axis=1)
    out_MD = (
        acc_MD * (1.0 / tl.maximum(sum_M, 1.0))[:, None]
    )  # the largest weight is 1, so only an empty sum is below it
    return tl.where(out_MD == 0, 0.0, out_MD)


@triton.jit
def paged_kv_slots(table, start, end, PAGE: tl.constexpr):
    """Return the KV slots of positions [start, start + BLOCK), and any numbers past `end`. It
    proceeds page by page, because one number per page needs no exchange between lanes.
    """
    t_T = tl.arange(0, BLOCK)
    kv_slot_T = tl.zeros([BLOCK], tl.int32)
    for i in tl.static_range(BLOCK // PAGE):
        page = tl.load(table + start // PAGE + i, start + i * PAGE < end, other=0)
        kv_slot_T = tl.where(t_T // PAGE == i, page * PAGE + t_T % PAGE, kv_slot_T)
    return kv_slot_T


@triton.jit
def row_kv_slots(table, own, base, start, end, FIRST: tl.constexpr, PAGE: tl.constexpr):
    """Return the KV slots of positions [start, start + BLOCK) for one row: in pages below `base`,
    then along the row's path.
    """
    p_T = start + tl.arange(0, BLOCK)
    own_T = tl.load(own + p_T - base, (p_T >= base) & (p_T >= FIRST) & (p_T < end), other=0)
    return tl.where(p_T < base, paged_kv_slots(table, start, tl.minimum(base, end), PAGE), own_T)
