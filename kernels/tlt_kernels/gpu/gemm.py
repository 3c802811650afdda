"""Matrix products with a fixed order of addition: the bits of a row depend on that row and on the weights alone.

For each output element k ascends in the tensor cores' steps of 16 within a segment of K, and segments are added in order. Which rows
are computed beside it, how they are tiled, by which kernel and how deep copies run ahead changes nothing: tensor cores add in the
same order whatever the tile. Called by the models; `gemm_tiles.py` chooses tiles by the number of rows.

Legend: M rows, N outputs, K inputs, I intermediate, X = 2I, P partial sums. Weights are [N, K] as in checkpoints.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
from torch import Tensor

from tlt_kernels.gpu import gemm_portable
from tlt_kernels.gpu.gemm_tiles import SEGMENT_UNIT, Kind, kind_of_linear, portable_tile, stream_tile


@cache
def _streams(device: torch.device) -> bool:
    """Whether the device is of the kind that `gemm_stream` is written for, and Triton has what it is written in."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return False
    try:
        import tlt_kernels.gpu.gemm_stream  # noqa: F401
    except ImportError:
        return False
    return True


def _multiply(kind: Kind, x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, out_PMN: Tensor, segment: int) -> None:
    rows = len(x_MK)
    if rows == 0:
        return
    interleaves = kind is not Kind.GATED or out_PMN.shape[-1] % 8 == 0  # eight rows of gate beside eight of up
    if x_MK.dtype == torch.bfloat16 and interleaves and _streams(x_MK.device):
        from tlt_kernels.gpu import gemm_stream

        gemm_stream.multiply(stream_tile(kind, rows), x_MK, weight_NK, bias_N, out_PMN, segment, kind is Kind.GATED)
    else:
        gemm_portable.multiply(portable_tile(rows, x_MK.dtype), x_MK, weight_NK, bias_N, out_PMN, segment, kind is Kind.GATED)


def linear(x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """x @ weight^T + bias, rounded once to `out_dtype` (x's by default; float32 for the LM head)."""
    out_MN = torch.empty(len(x_MK), len(weight_NK), dtype=out_dtype or x_MK.dtype, device=x_MK.device)
    _multiply(kind_of_linear(len(weight_NK)), x_MK, weight_NK, bias_N, out_MN, x_MK.shape[1])
    return out_MN


def partials(x_MK: Tensor, weight_NK: Tensor, *, segments: int) -> Tensor:
    """x @ weight^T as float32 sums over at most `segments` segments of K, [P, M, N]: whoever reads them adds them in order."""
    segment = triton.cdiv(triton.cdiv(x_MK.shape[1], SEGMENT_UNIT), segments) * SEGMENT_UNIT
    parts = triton.cdiv(x_MK.shape[1], segment)
    out_PMN = torch.empty(parts, len(x_MK), len(weight_NK), dtype=torch.float32, device=x_MK.device)
    _multiply(Kind.PARTIALS, x_MK, weight_NK, None, out_PMN, segment)
    return out_PMN


def gated(x_MK: Tensor, weight_XK: Tensor) -> Tensor:
    """silu(gate) * up, computed in float32 and rounded once; the weight's first I rows are the gate's, the rest up's."""
    out_MI = torch.empty(len(x_MK), len(weight_XK) // 2, dtype=x_MK.dtype, device=x_MK.device)
    _multiply(Kind.GATED, x_MK, weight_XK, None, out_MI, x_MK.shape[1])
    return out_MI
