"""Row kernels between the matmuls: norms, rotary embedding with KV store, gated activation, e4m3,
copies of KV slots.

The models call them. They are single-threaded: at the widths that a CPU serves, a row takes under a
microsecond, and waking a second thread costs more than it saves. Bits depend on the row alone:
every reduction runs over one row, whose width is a property of the weights.

Legend: R rows, H hidden, I intermediate, N query heads, K KV heads, D head width, S KV slots, P
positions, L layers.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import int32, njit
from torch import Tensor

from tlt_kernels.cpu.compiled import kernel
from tlt_kernels.cpu.exponential import exp, float_from_bits

_DOT = {"reassoc", "contract", "nsz"}  # vectorised sums; NaN and infinity keep their meaning
_ONE = np.float32(1.0)
BLOCK = 128  # values of one scale, as in `tlt_client.quantise`
_MAX = np.float32(448.0)  # the largest e4m3 number
_NO_WEIGHT = torch.empty(0)


@kernel("(f4[:, ::1], f4[::1], f4, f4[:, ::1])", fastmath=_DOT, error_model="numpy", nogil=True)
def _rms_norm(x_RH, weight_H, eps, out_RH):
    width = x_RH.shape[1]
    for r in range(x_RH.shape[0]):
        total = np.float32(0.0)
        for h in range(width):
            total += x_RH[r, h] * x_RH[r, h]
        scale = _ONE / np.sqrt(total / np.float32(width) + eps)
        for h in range(width):
            out_RH[r, h] = weight_H[h] * (x_RH[r, h] * scale)


@kernel(
    "(f4[:, ::1], f4[:, ::1], f4[::1], f4, f4[:, ::1])",
    fastmath=_DOT,
    error_model="numpy",
    nogil=True,
)
def _add_rms_norm(x_RH, residual_RH, weight_H, eps, out_RH):
    width = x_RH.shape[1]
    for r in range(x_RH.shape[0]):
        for h in range(width):
            residual_RH[r, h] += x_RH[r, h]
        total = np.float32(0.0)
        for h in range(width):
            total += residual_RH[r, h] * residual_RH[r, h]
        scale = _ONE / np.sqrt(total / np.float32(width) + eps)
        for h in range(width):
            out_RH[r, h] = weight_H[h] * (residual_RH[r, h] * scale)


@njit(cache=True, fastmath=_DOT, error_model="numpy")
def _rotate_head(x_RX, r, start, weight_D, eps, cos_PD2, sin_PD2, p, out, row, n):
    """Norm the head at x_RX[r, start:] if it has a weight, then rotate the pairs (i, i + D/2) into
    out[row, n].
    """
    width = out.shape[2]
    half = width // 2
    if weight_D.shape[0] == 0:
        for i in range(half):
            low, high, cos, sin = (
                x_RX[r, start + i],
                x_RX[r, start + half + i],
                cos_PD2[p, i],
                sin_PD2[p, i],
            )
            out[row, n, i] = low * cos - high * sin
            out[row, n, half + i] = high * cos + low * sin
        return
    total = np.float32(0.0)
    for i in range(width):
        total += x_RX[r, start + i] * x_RX[r, start + i]
    scale = _ONE / np.sqrt(total / np.float32(width) + eps)
    for i in range(half):
        low, high = (
            weight_D[i] * (x_RX[r, start + i] * scale),
            weight_D[half + i] * (x_RX[r, start + half + i] * scale),
        )
        out[row, n, i] = low * cos_PD2[p, i] - high * sin_PD2[p, i]
        out[row, n, half + i] = high * cos_PD2[p, i] + low * sin_PD2[p, i]


@kernel(
    "(f4[:, ::1], f4[::1], f4[::1], f4, f4[:, ::1], f4[:, ::1], i8[::1], i8[::1],"
    " f4[:, :, ::1], f4[:, :, ::1], f4[:, :, ::1])",
    fastmath=_DOT,
    error_model="numpy",
    nogil=True,
)
def _rope_store(
    qkv_RX,
    q_weight_D,
    k_weight_D,
    eps,
    cos_PD2,
    sin_PD2,
    position_R,
    kv_slot_R,
    k_SKD,
    v_SKD,
    q_RND,
):
    heads, kv_heads, width = q_RND.shape[1], k_SKD.shape[1], k_SKD.shape[2]
    for r in range(qkv_RX.shape[0]):
        p, kv_slot = position_R[r], kv_slot_R[r]
        for n in range(heads):
            _rotate_head(qkv_RX, r, n * width, q_weight_D, eps, cos_PD2, sin_PD2, p, q_RND, r, n)
        for n in range(kv_heads):
            _rotate_head(
                qkv_RX,
                r,
                (heads + n) * width,
                k_weight_D,
                eps,
                cos_PD2,
                sin_PD2,
                p,
                k_SKD,
                kv_slot,
                n,
            )
            start = (heads + kv_heads + n) * width
            for d in range(width):
                v_SKD[kv_slot, n, d] = qkv_RX[r, start + d]


@kernel("(f4[:, ::1], f4[:, ::1])", fastmath={"contract"}, error_model="numpy", nogil=True)
def _silu_mul(gate_up_RX, out_RI):
    width = out_RI.shape[1]
    for r in range(out_RI.shape[0]):
        for i in range(width):
            gate = gate_up_RX[r, i]
            out_RI[r, i] = gate / (_ONE + exp(-gate)) * gate_up_RX[r, width + i]


@kernel("(f4[:, ::1], i4[:, ::1], f4[:, ::1])", error_model="numpy", nogil=True)
def _in_e4m3(x_RK, bits_RK, out_RK):
    """Round by bits: see `tlt_client.quantise`. `bits_RK`: those of x."""
    width = x_RK.shape[1]
    for r in range(x_RK.shape[0]):
        for first in range(0, width, BLOCK):
            end = min(first + BLOCK, width)
            top = int32(0)
            for k in range(first, end):
                top = max(top, bits_RK[r, k] & int32(0x7FFFFFFF))
            # The scale is 2^(exponent - 127); of values that all become zeros, 1.
            field = ((top + 0x17FFFF) >> 23) - 8
            exponent = int32(127 if top <= 17 << 23 else 27 if field < 27 else field)
            scale = float_from_bits(int32(exponent << 23))
            inverse = float_from_bits(int32((254 - exponent) << 23))
            for k in range(first, end):
                y = x_RK[r, k] * inverse
                y = -_MAX if y < -_MAX else y
                y = _MAX if y > _MAX else y
                # One unit of the last of four digits, or of subnormal numbers.
                unit = int32(((bits_RK[r, k] & int32(0x7FFFFFFF)) >> 23) - exponent + 124)
                unit = int32(118) if unit < 118 else unit
                # Adding and subtracting 1.5 * 2^23 units rounds to units.
                big = float_from_bits(int32(int32(unit + 23) << 23 | 0x400000))
                out_RK[r, k] = ((y + big) - big) * scale


@kernel("(f4[:, :, ::1], i8[::1], i8[::1])", nogil=True)
def _copy_kv_slots(array_LSX, source_C, target_C):
    for layer in range(array_LSX.shape[0]):
        for c in range(source_C.shape[0]):
            for x in range(array_LSX.shape[2]):
                array_LSX[layer, target_C[c], x] = array_LSX[layer, source_C[c], x]


def rms_norm(x_RH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """Return `weight * x / sqrt(mean(x^2) + eps)` per row (RMSNorm, arXiv 1910.07467)."""
    out_RH = torch.empty_like(x_RH)
    _rms_norm(x_RH.numpy(), weight_H.numpy(), eps, out_RH.numpy())
    return out_RH


def add_rms_norm(x_RH: Tensor, residual_RH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """Add x to the residual in place, and return the norm of the new residual."""
    out_RH = torch.empty_like(x_RH)
    _add_rms_norm(x_RH.numpy(), residual_RH.numpy(), weight_H.numpy(), eps, out_RH.numpy())
    return out_RH


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
    eps: float = 0.0,
) -> Tensor:
    """Split fused rows [q | k | v], norm q and k per head where weights are given, rotate them
    (pairs i, i + D/2; the Hugging Face convention) and write k and v at `kv_slot_R`. Returns q_RND.
    `heads=0` only stores.
    """
    q_RND = torch.empty(qkv_RX.shape[0], heads, k_SKD.shape[2])
    _rope_store(
        qkv_RX.numpy(),
        (_NO_WEIGHT if q_weight_D is None else q_weight_D).numpy(),
        (_NO_WEIGHT if k_weight_D is None else k_weight_D).numpy(),
        eps,
        cos_PD2.numpy(),
        sin_PD2.numpy(),
        position_R.numpy(),
        kv_slot_R.numpy(),
        k_SKD.numpy(),
        v_SKD.numpy(),
        q_RND.numpy(),
    )
    return q_RND


def silu_mul(gate_up_RX: Tensor) -> Tensor:
    """Return `silu(gate) * up` of fused rows [gate | up], X = 2I, as [R, I]."""
    out_RI = torch.empty(gate_up_RX.shape[0], gate_up_RX.shape[1] // 2)
    _silu_mul(gate_up_RX.numpy(), out_RI.numpy())
    return out_RI


def in_e4m3(x_RK: Tensor) -> Tensor:
    """Return x quantised to e4m3, with one scale per row and 128 of K, as float32 values times
    scales. A second time changes nothing.
    """
    x_RK, out_RK = x_RK.contiguous(), torch.empty(x_RK.shape)
    _in_e4m3(x_RK.numpy(), x_RK.view(torch.int32).numpy(), out_RK.numpy())
    return out_RK


def copy_kv_slots(array: Tensor, source_C: Tensor, target_C: Tensor) -> None:
    """Copy KV slots in order, in place. `array` is [S, X] (features) or [L, S, K, D] (keys or
    values of all layers).
    """
    layers, kv_slots = (array.shape[0], array.shape[1]) if array.dim() > 2 else (1, array.shape[0])
    if array.numel() and source_C.numel():
        _copy_kv_slots(array.view(layers, kv_slots, -1).numpy(), source_C.numpy(), target_C.numpy())
