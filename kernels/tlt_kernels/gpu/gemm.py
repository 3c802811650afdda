"""Matmuls with a fixed order of addition: the bits of a row depend only on that row and the
weights.

For each output element, k ascends in the tensor cores' steps of 16 within a leaf (reduction
segment) of K, and leaves are added as a fixed binary tree, ((l0 + l1) + (l2 + l3)) + ... One leaf
is all of K, except in `partials`: there a program adds some leaves in registers, and the reader
adds the rest. The tree is the same for every cut, so a slice of K of neighbouring leaves gives the
partial sums of that slice. The other rows of the call, the tiling, the kernel and the depth of the
copies change nothing, because tensor cores add in the same order in every tile. The models call
this file; `gemm_tiles.py` chooses the tiles.

Legend: M rows, N outputs, K inputs, I intermediate, X = 2I, P partial sums. Weights are [N, K] as
in checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import torch
import triton
from torch import Tensor

from tlt_kernels.gpu import gemm_portable
from tlt_kernels.gpu.gemm_tiles import (
    LEAF_COUNTS,
    PARTS,
    Kind,
    Tile,
    kind_of_linear,
    kind_of_partials,
    leaf_size,
    portable_tile,
    stream_tile,
)

INTERLEAVED = 8  # rows of gate, then as many of up: the order in which `gemm_stream` reads them


@cache
def _hindrance(dtype: torch.dtype, device: torch.device) -> str:
    """Return the reason why `gemm_stream` cannot be used, or an empty string."""
    if dtype != torch.bfloat16:
        name = str(dtype).removeprefix("torch.")
        return f"the type is {name}, and the streaming kernel is for bfloat16"
    if device.type != "cuda":
        return f"the device is {device.type}, and the streaming kernel is for a GPU"
    major, minor = torch.cuda.get_device_capability(device)
    if major != 9:
        return (
            f"the GPU has compute capability {major}.{minor}, and the streaming kernel is for 9.x"
        )
    try:
        import tlt_kernels.gpu.gemm_stream  # noqa: F401
    except ImportError as error:
        return (
            f"Triton {triton.__version__} lacks what the streaming kernel is written in ({error})"
        )
    return ""


def in_use(dtype: torch.dtype, device: torch.device, intermediate: int) -> str:
    """Return the name of the matmul kernel for an MLP of this intermediate size: "streaming", or
    "portable: " and the reason.
    """
    why = _hindrance(dtype, device)
    if not why and intermediate % INTERLEAVED:
        why = f"the intermediate size {intermediate} is no multiple of {INTERLEAVED}"
    return f"portable: {why}" if why else "streaming"


def _chosen(
    kind: Kind, x_MK: Tensor, weight_NK: Tensor, leaves: int = 1, parts: int = 1
) -> tuple[Callable[..., None], Tile]:
    """Return the function that multiplies, and its tile."""
    n = len(weight_NK)
    if in_use(x_MK.dtype, x_MK.device, n // 2 if kind is Kind.GATED else 0) == "streaming":
        from tlt_kernels.gpu import gemm_stream

        programs = gemm_stream.multiprocessors(x_MK.device)
        return gemm_stream.multiply, stream_tile(kind, len(x_MK), n, programs, leaves, parts)
    return gemm_portable.multiply, portable_tile(len(x_MK), x_MK.dtype)


def _multiply(
    kind: Kind, x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, out_MN: Tensor
) -> None:
    """Multiply with all of K as one leaf."""
    if len(x_MK):
        multiply, tile = _chosen(kind, x_MK, weight_NK)
        multiply(tile, x_MK, weight_NK, bias_N, out_MN, x_MK.shape[1], 1, kind is Kind.GATED)


def linear(
    x_MK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    out_MN: Tensor | None = None,
) -> Tensor:
    """Return x @ weight^T + bias, rounded once to `out_dtype` (x's by default; float32 for the LM
    head), in `out_MN` if given.
    """
    if out_MN is None:
        out_MN = torch.empty(
            len(x_MK), len(weight_NK), dtype=out_dtype or x_MK.dtype, device=x_MK.device
        )
    assert out_MN.shape == (len(x_MK), len(weight_NK)) and out_MN.is_contiguous()
    _multiply(kind_of_linear(len(weight_NK)), x_MK, weight_NK, bias_N, out_MN)
    return out_MN


def partials(
    x_MK: Tensor, weight_NK: Tensor, *, leaves: int, parts: int = PARTS, room: Tensor | None = None
) -> Tensor:
    """Return x @ weight^T as float32 sums over neighbouring leaves of K, [P, M, N]; `norm.tree`
    adds them. P depends on the number of rows, and is at least `parts` if there are as many leaves;
    the total depends on neither. The sums are written to the beginning of the float32 tensor
    `room`, if given.
    """
    if leaves not in LEAF_COUNTS:
        raise ValueError(f"K cannot be cut into {leaves} leaves; take one of {LEAF_COUNTS}")
    (m, k), n = x_MK.shape, len(weight_NK)
    multiply, tile = _chosen(kind_of_partials(leaves, parts), x_MK, weight_NK, leaves, parts)
    leaf, fold = leaf_size(k, leaves), tile.fold(leaves, parts)
    shape = triton.cdiv(k, leaf * fold), m, n
    if room is None:
        out_PMN = torch.empty(shape, dtype=torch.float32, device=x_MK.device)
    else:
        out_PMN = room[: math.prod(shape)].view(shape)
    if m:
        multiply(tile, x_MK, weight_NK, None, out_PMN, leaf, fold, False)
    return out_PMN


def gated(x_MK: Tensor, weight_XK: Tensor) -> Tensor:
    """Return silu(gate) * up, computed in float32 and rounded once. The weight's first I rows are
    the gate's, the rest are up's.
    """
    out_MI = torch.empty(len(x_MK), len(weight_XK) // 2, dtype=x_MK.dtype, device=x_MK.device)
    _multiply(Kind.GATED, x_MK, weight_XK, None, out_MI)
    return out_MI
