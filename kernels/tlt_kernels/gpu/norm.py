"""RMSNorm fused with its neighbours in a decoder: the embedding before it, or the partial sums and
the residual stream.

There is one row per program, and the number of warps depends on H only, so a row's bits depend on
that row alone. Arithmetic is float32, rounded once; the residual stream stays float32. The models
call these kernels between the matmuls. A norm may be written in e4m3, with the scales that its
rounded values have.

Legend: R rows, H hidden, V vocabulary, P partial sums of a matmul.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tlt_kernels.gpu.quantise import Quantised, Rows, places, put_row
from tlt_kernels.gpu.target import PDL, pdl_launch, pdl_wait


@triton.jit
def _normed(x, weight, eps, H: tl.constexpr):
    """Return the norm of x, which is 0 beyond H."""
    return weight * (x * tl.rsqrt(tl.sum(x * x, axis=0) / H + eps))


@triton.jit
def tree(part, stride, mask, P: tl.constexpr):
    """Return the sum of P partial sums, `stride` elements apart, as a binary tree: ((p0 + p1) + (p2
    + p3)) + ... Missing partial sums at the end add nothing.
    """
    HALF: tl.constexpr = 4 if P > 4 else P // 2 + P % 2
    if P == 1:
        total = tl.load(part, mask=mask, other=0.0)
    else:
        total = tree(part, stride, mask, HALF)
        total += tree(part + HALF * stride, stride, mask, P - HALF)
    return total


@triton.jit
def _rms_norm(x_RH, weight_H, out_RH, eps, H: tl.constexpr, BLOCK: tl.constexpr):
    pdl_launch()
    h = tl.arange(0, BLOCK)
    inside = h < H
    weight = tl.load(weight_H + h, mask=inside, other=0.0).to(tl.float32)
    row = tl.program_id(0).to(tl.int64) * H
    pdl_wait()
    x = tl.load(x_RH + row + h, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_RH + row + h, _normed(x, weight, eps, H).to(out_RH.dtype.element_ty), mask=inside)


@triton.jit
def add_to_residual(
    total, residual, weight, residual_RH, bias_H, weight_H, out_RH, scales_GW, W, row, at, h,
    inside, eps,
    BIASED: tl.constexpr, NORMED: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the bias, then the residual, to the sum of the row that begins at `at`, and store the
    residual and its norm.
    """
    if BIASED:
        total += tl.load(bias_H + h, mask=inside, other=0.0).to(tl.float32)
    residual += total
    tl.store(residual_RH + at + h, residual, mask=inside)
    out = _normed(residual, weight, eps, H) if NORMED else residual
    put_row(out, out_RH, scales_GW, W, row, at, h, inside, weight_H, H, BLOCK)


@triton.jit(do_not_specialize=["rows"])
def _add_rms_norm(
    part_PRH,
    residual_RH,
    bias_H,
    weight_H,
    out_RH,
    scales_GW,
    W,
    eps,
    rows,
    P: tl.constexpr,
    BIASED: tl.constexpr,
    NORMED: tl.constexpr,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pdl_launch()
    h = tl.arange(0, BLOCK)
    inside = h < H
    weight = tl.load(weight_H + h, mask=inside, other=0.0).to(tl.float32) if NORMED else 0.0
    row = tl.program_id(0).to(tl.int64)
    at = row * H
    pdl_wait()
    residual = tl.load(residual_RH + at + h, mask=inside, other=0.0)
    total = tree(part_PRH + at + h, rows.to(tl.int64) * H, inside, P)
    add_to_residual(
        total, residual, weight, residual_RH, bias_H, weight_H, out_RH, scales_GW, W, row, at, h,
        inside, eps, BIASED, NORMED, H, BLOCK,
    )  # fmt: skip


@triton.jit
def _embed_rms_norm(
    token_R,
    embedding_VH,
    weight_H,
    residual_RH,
    out_RH,
    scales_GW,
    W,
    eps,
    vocabulary,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pdl_launch()
    h = tl.arange(0, BLOCK)
    inside = h < H
    weight = tl.load(weight_H + h, mask=inside, other=0.0).to(tl.float32)
    r = tl.program_id(0).to(tl.int64)
    pdl_wait()
    token = tl.minimum(tl.maximum(tl.load(token_R + r), 0), vocabulary - 1).to(tl.int64)
    x = tl.load(embedding_VH + token * H + h, mask=inside, other=0.0).to(tl.float32)
    tl.store(residual_RH + r * H + h, x, mask=inside)
    normed = _normed(x, weight, eps, H)
    put_row(normed, out_RH, scales_GW, W, r, r * H, h, inside, weight_H, H, BLOCK)


@triton.jit
def _embed_halves(
    token_R,
    embedding_VH,
    w_embed_H,
    g_RH,
    w_feature_H,
    out_RX,
    scales_GW,
    W,
    eps,
    vocabulary,
    NORMED: tl.constexpr,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write, in program (r, 0), the embedding into the left half of row r, and in program (r, 1)
    the feature into the right half; NORMED: the norms of both.
    """
    pdl_launch()
    h = tl.arange(0, BLOCK)
    inside = h < H
    r, half = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if NORMED:
        weight = tl.load((w_embed_H if half == 0 else w_feature_H) + h, mask=inside, other=0.0).to(
            tl.float32
        )
    pdl_wait()
    if half == 0:
        token = tl.minimum(tl.maximum(tl.load(token_R + r), 0), vocabulary - 1).to(tl.int64)
        x = tl.load(embedding_VH + token * H + h, mask=inside, other=0.0).to(tl.float32)
    else:
        x = tl.load(g_RH + r * H + h, mask=inside, other=0.0).to(tl.float32)
    if NORMED:
        x = _normed(x, weight, eps, H)
    if scales_GW is not None:
        scales_GW += half * (H // 128) * W
    put_row(x, out_RX, scales_GW, W, r, (r * 2 + half) * H, h, inside, embedding_VH, H, BLOCK)


def shape(hidden: int) -> dict[str, int]:
    block = triton.next_power_of_2(hidden)
    return {"H": hidden, "BLOCK": block, "num_warps": min(16, max(1, block // 256))}


def rms_norm(x_RH: Tensor, weight_H: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """Return weight * (x * rsqrt(mean(x^2) + eps)) in the weight's dtype."""
    out_RH = (
        torch.empty(x_RH.shape, dtype=weight_H.dtype, device=x_RH.device) if out is None else out
    )
    if len(x_RH):
        _rms_norm[(len(x_RH),)](x_RH, weight_H, out_RH, eps, **shape(x_RH.shape[1]), **PDL)
    return out_RH


def add_rms_norm(
    part_PRH: Tensor,
    residual_RH: Tensor,
    weight_H: Tensor | None,
    eps: float,
    *,
    bias_H: Tensor | None = None,
    out_RH: Tensor | None = None,
) -> Tensor:
    """Add the partial sums as a tree, then the bias, to the residual (in place). Return its norm in
    the weight's dtype, in `out_RH` if given; without a weight, the residual itself.
    """
    if out_RH is None:
        assert weight_H is not None
        out_RH = torch.empty(part_PRH.shape[1:], dtype=weight_H.dtype, device=weight_H.device)
    return add_rms_norm_into(out_RH, part_PRH, residual_RH, weight_H, eps, bias_H=bias_H)


def add(part_PRH: Tensor, residual_RH: Tensor, dtype: torch.dtype) -> Tensor:
    """Add the partial sums as a tree to the residual (in place), and return it rounded to
    `dtype`.
    """
    out_RH = torch.empty(part_PRH.shape[1:], dtype=dtype, device=part_PRH.device)
    return add_rms_norm_into(out_RH, part_PRH, residual_RH, None, 0.0)


def add_rms_norm_into(
    out_RH: Rows,
    part_PRH: Tensor,
    residual_RH: Tensor,
    weight_H: Tensor | None,
    eps: float,
    *,
    bias_H: Tensor | None = None,
) -> Rows:
    """Compute `add_rms_norm`, whose norm may be quantised."""
    parts, rows, hidden = part_PRH.shape
    if rows:
        _add_rms_norm[(rows,)](
            part_PRH,
            residual_RH,
            bias_H,
            weight_H,
            *places(out_RH),
            eps,
            rows,
            P=parts,
            BIASED=bias_H is not None,
            NORMED=weight_H is not None,
            **shape(hidden),
            **PDL,
        )
    return out_RH


def embed_rms_norm(
    token_R: Tensor, embedding_VH: Tensor, weight_H: Tensor, eps: float, out_RH: Tensor | Quantised
) -> Tensor:
    """Return the embeddings of tokens as a float32 residual stream; write their norm to `out_RH`.
    Ids out of range (dead rows) are clamped.
    """
    rows, (vocabulary, hidden) = len(token_R), embedding_VH.shape
    residual_RH = torch.empty(rows, hidden, dtype=torch.float32, device=embedding_VH.device)
    if rows:
        _embed_rms_norm[(rows,)](
            token_R,
            embedding_VH,
            weight_H,
            residual_RH,
            *places(out_RH),
            eps,
            vocabulary,
            **shape(hidden),
            **PDL,
        )
    return residual_RH


def embed_norms(
    token_R: Tensor,
    embedding_VH: Tensor,
    w_embed_H: Tensor,
    g_RH: Tensor,
    w_feature_H: Tensor,
    eps: float,
    out_RX: Rows,
) -> Rows:
    """Write and return the input of an EAGLE-3 layer, [R, 2H]: the norm of the tokens' embeddings,
    then the norm of the features g.
    """
    return _embed_beside(token_R, embedding_VH, w_embed_H, g_RH, w_feature_H, eps, out_RX)


def embed_beside(token_R: Tensor, embedding_VH: Tensor, g_RH: Tensor) -> Tensor:
    """Return the tokens' embeddings, then the features g, [R, 2H], in the embedding's dtype."""
    shape, dtype = (len(token_R), 2 * embedding_VH.shape[1]), embedding_VH.dtype
    out_RX = torch.empty(shape, dtype=dtype, device=embedding_VH.device)
    return _embed_beside(token_R, embedding_VH, None, g_RH, None, 0.0, out_RX)


def _embed_beside(
    token_R: Tensor,
    embedding_VH: Tensor,
    w_embed_H: Tensor | None,
    g_RH: Tensor,
    w_feature_H: Tensor | None,
    eps: float,
    out_RX: Rows,
) -> Rows:
    rows, (vocabulary, hidden) = len(token_R), embedding_VH.shape
    if rows:
        _embed_halves[(rows, 2)](
            token_R,
            embedding_VH,
            w_embed_H,
            g_RH,
            w_feature_H,
            *places(out_RX),
            eps,
            vocabulary,
            NORMED=w_embed_H is not None,
            **shape(hidden),
            **PDL,
        )
    return out_RX
