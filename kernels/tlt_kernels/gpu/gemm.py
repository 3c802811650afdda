"""Matmuls with a fixed order of addition: the bits of a row depend only on that row and the
weights.

For each output element, k ascends in the tensor cores' steps of 16 within a leaf (reduction
segment) of K, and leaves are added as a fixed binary tree, ((l0 + l1) + (l2 + l3)) + ... One leaf
is all of K, except in `partials`: there a program adds some leaves in registers, and the reader
adds the rest. The tree is the same for every cut, so a slice of K of neighbouring leaves gives the
partial sums of that slice. The other rows of the call, the tiling, the kernel and the depth of the
copies change nothing, because tensor cores add in the same order in every tile. The models call
this file; `gemm_tiles.py` chooses the tiles.

For an e4m3 weight each 128 of K are a sum of e4m3 products of its own. It is multiplied by the
row's scale times the block's, and these are added in ascending order within a leaf, each by one
fused multiply-add.

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
from tlt_kernels.gpu.quantise import BLOCK, E4M3, Matrix, Quantised, quantise_rows

INTERLEAVED = 8  # rows of gate, then as many of up: the order in which `gemm_stream` reads them


@cache
def _hindrance(dtype: torch.dtype, device: torch.device) -> str:
    """Return the reason why `gemm_stream` cannot be used, or an empty string."""
    if dtype not in (torch.bfloat16, E4M3):
        name = str(dtype).removeprefix("torch.")
        return f"the type is {name}, and the streaming kernel is for bfloat16 and FP8"
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


def _taken(x: Tensor | Quantised, weight: Matrix) -> tuple[Tensor | Quantised, int, torch.dtype]:
    """Return x as this weight's matmul takes it, its rows, and the type that results have if the
    caller names none.
    """
    if isinstance(x, Quantised):
        return x, len(x.values_MK), torch.bfloat16
    return x if weight.scales is None else quantise_rows(x), len(x), x.dtype


def _chosen(
    kind: Kind, m: int, weight: Matrix, leaves: int = 1, parts: int = 1
) -> tuple[Callable[..., None], Tile]:
    """Return the function that multiplies m rows, and its tile."""
    n, dtype, device = len(weight.values), weight.values.dtype, weight.values.device
    if in_use(dtype, device, n // 2 if kind is Kind.GATED else 0) == "streaming":
        from tlt_kernels.gpu import gemm_stream

        programs = gemm_stream.multiprocessors(device)
        scaled = weight.scales is not None
        tile = stream_tile(kind, m, n, programs, leaves, parts, scaled=scaled)
        return gemm_stream.multiply, tile
    return gemm_portable.multiply, portable_tile(m, dtype)


def _multiply(
    kind: Kind, x: Tensor | Quantised, weight: Matrix, bias_N: Tensor | None, out_MN: Tensor
) -> None:
    """Multiply with all of K as one leaf."""
    if len(out_MN):
        multiply, tile = _chosen(kind, len(out_MN), weight)
        k = weight.values.shape[1]
        multiply(tile, x, weight, bias_N, out_MN, k, 1, kind is Kind.GATED)


def linear(
    x: Tensor | Quantised,
    weight: Matrix,
    bias_N: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    out_MN: Tensor | None = None,
) -> Tensor:
    """Return x @ weight^T + bias, rounded once to `out_dtype` (x's by default; float32 for the LM
    head), in `out_MN` if given.
    """
    x, m, dtype = _taken(x, weight)
    n, device = len(weight.values), weight.values.device
    if out_MN is None:
        out_MN = torch.empty(m, n, dtype=out_dtype or dtype, device=device)
    assert out_MN.shape == (m, n) and out_MN.is_contiguous()
    _multiply(kind_of_linear(n), x, weight, bias_N, out_MN)
    return out_MN


def partials(
    x: Tensor | Quantised,
    weight: Matrix,
    *,
    leaves: int,
    parts: int = PARTS,
    room: Tensor | None = None,
) -> Tensor:
    """Return x @ weight^T as float32 sums over neighbouring leaves of K, [P, M, N]; `norm.tree`
    adds them. P depends on the number of rows, and is at least `parts` if there are as many leaves;
    the total depends on neither. The sums are written to the beginning of the float32 tensor
    `room`, if given.
    """
    if leaves not in LEAF_COUNTS:
        raise ValueError(f"K cannot be cut into {leaves} leaves; take one of {LEAF_COUNTS}")
    x, m, _ = _taken(x, weight)
    n, k = weight.values.shape
    multiply, tile = _chosen(kind_of_partials(leaves, parts), m, weight, leaves, parts)
    leaf, fold = leaf_size(k, leaves), tile.fold(leaves, parts)
    shape = triton.cdiv(k, leaf * fold), m, n
    if room is None:
        out_PMN = torch.empty(shape, dtype=torch.float32, device=weight.values.device)
    else:
        out_PMN = room[: math.prod(shape)].view(shape)
    if m:
        multiply(tile, x, weight, None, out_PMN, leaf, fold, False)
    return out_PMN


def gated(x: Tensor | Quantised, weight: Matrix, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """Return silu(gate) * up, computed in float32 and rounded once. The weight's first I rows are
    the gate's, the rest are up's.
    """
    x, m, dtype = _taken(x, weight)
    n, device = len(weight.values), weight.values.device
    assert weight.scales is None or n % (2 * BLOCK) == 0, "gate and up share a block of scales"
    out_MI = torch.empty(m, n // 2, dtype=out_dtype or dtype, device=device)
    _multiply(Kind.GATED, x, weight, None, out_MI)
    return out_MI
