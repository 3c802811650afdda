"""Slow twins of the kernels, with no regard for speed or order of summation.

The tests compare every kernel with its twin. Layers are in plain PyTorch; arguments are those of
the kernel, see `cpu/elementwise.py` and `cpu/attention.py` for shapes. Where `double` is true the
arithmetic is float64, to serve as ground truth. Sampling is in plain numpy and shares no code with
the fast kernels: arithmetic that decides a token is float32 in both, sums here are float64.

Legend of sampling: S rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tlt_kernels.filters import Filters


def rms_norm(x_RH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    return weight_H * (x_RH * torch.rsqrt(x_RH.pow(2).mean(-1, keepdim=True) + eps))


def add_rms_norm(x_RH: Tensor, residual_RH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    residual_RH += x_RH
    return rms_norm(residual_RH, weight_H, eps)


def leaf_sums(x_MK: Tensor, weight_NK: Tensor, leaf: int) -> Tensor:
    """Return x @ weight^T over each leaf of K, [L, M, N]."""
    both = zip(x_MK.split(leaf, dim=1), weight_NK.split(leaf, dim=1), strict=True)
    return torch.stack([x @ weight.T for x, weight in both])


def scaled_leaf_sums(
    x_MK: Tensor, row_scales_GM: Tensor, weight_NK: Tensor, scales_BG: Tensor, leaf: int
) -> Tensor:
    """Return `leaf_sums` of e4m3 operands, where the sum of each 128 of K is multiplied by the
    scales of its row and block. Sums of 128 products are in float64, all else in float32.
    """
    scales_NG = scales_BG.repeat_interleave(128, 0)[: len(weight_NK)]
    leaf_LMN = torch.zeros(-(-x_MK.shape[1] // leaf), len(x_MK), len(weight_NK))
    for g, row_scales_M in enumerate(row_scales_GM[:, : len(x_MK)]):
        k = slice(g * 128, (g + 1) * 128)
        sum_MN = (x_MK[:, k].double() @ weight_NK[:, k].double().T).float()
        scaled_MN = sum_MN * (row_scales_M[:, None] * scales_NG[:, g])
        leaf_LMN[g * 128 // leaf] += scaled_MN
    return leaf_LMN


def tree(part_PMN: Tensor) -> Tensor:
    """Return ((p0 + p1) + (p2 + p3)) + ...; what is missing at the end adds nothing."""
    parts = list(part_PMN)
    while len(parts) > 1:
        pairs = [parts[i : i + 2] for i in range(0, len(parts), 2)]
        parts = [pair[0] + pair[1] if len(pair) == 2 else pair[0] for pair in pairs]
    return parts[0]


def exchange_add_rms_norm(
    part_TPRH: Tensor, residual_RH: Tensor, weight_H: Tensor, eps: float, bias_H: Tensor
) -> Tensor:
    """`part_TPRH`: the partial sums of all ranks, each of which returns this."""
    residual_RH += tree(part_TPRH.flatten(0, 1)) + bias_H
    return rms_norm(residual_RH, weight_H, eps)


def rotate(x_RND: Tensor, cos_RD2: Tensor, sin_RD2: Tensor) -> Tensor:
    low, high = x_RND.chunk(2, dim=-1)
    cos, sin = cos_RD2[:, None], sin_RD2[:, None]
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


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
    kv_heads, width = k_SKD.shape[1:]
    q, k, v = qkv_RX.view(len(qkv_RX), -1, width).split([heads, kv_heads, kv_heads], dim=1)
    if q_weight_D is not None:
        q = rms_norm(q, q_weight_D, eps)
    if k_weight_D is not None:
        k = rms_norm(k, k_weight_D, eps)
    cos, sin = cos_PD2[position_R], sin_PD2[position_R]
    for i, (cache_SKD, x_RKD) in enumerate([(k_SKD, rotate(k, cos, sin)), (v_SKD, v)]):
        if scale_2KS is not None:
            x_RKD, scale_RK = quantise_heads(x_RKD.to(qkv_RX.dtype))
            scale_2KS[i, :, kv_slot_R] = scale_RK.T.to(scale_2KS.dtype)
        cache_SKD[kv_slot_R] = x_RKD.to(cache_SKD.dtype)
    return rotate(q, cos, sin)


def quantise_heads(x_RKD: Tensor) -> tuple[Tensor, Tensor]:
    """Return e4m3 numbers and a scale per head, the smallest power of two s with max |x| / s <= 464
    that is at least 2^-100; 1 where every number would be 0.
    """
    top_RK = x_RKD.double().abs().amax(-1)
    mantissa_RK, exponent_RK = torch.frexp(top_RK)  # a mantissa from 1/2 to 1
    scale_RK = torch.exp2(exponent_RK - 9.0 + (mantissa_RK > 464 / 512))
    scale_RK = torch.where(top_RK <= 2.0**-110, 1.0, scale_RK.clamp_min(2.0**-100))
    scaled_RKD = (x_RKD.double() / scale_RK[:, :, None]).clamp(-448.0, 448.0)
    return scaled_RKD.to(torch.float8_e4m3fn), scale_RK


def silu_mul(gate_up_RX: Tensor) -> Tensor:
    gate, up = gate_up_RX.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def copy_kv_slots(array: Tensor, source_C: Tensor, target_C: Tensor) -> None:
    for source, target in zip(source_C.tolist(), target_C.tolist(), strict=True):
        if array.dim() > 2:
            array[:, target] = array[:, source]
        else:
            array[target] = array[source]


class VisibleKeys(NamedTuple):
    """The keys that each row sees, found as in `tlt_server.attention.rows`."""

    position_R: Tensor
    request_R: Tensor  # index into B
    base_B: Tensor
    page_table_BP: Tensor
    path_RD: Tensor
    page_size: int

    def kv_slots(self, r: int, first: int) -> Tensor:
        """Return the KV slots of key positions [first, position_R[r]] of row r, in order."""
        b, last = int(self.request_R[r]), int(self.position_R[r])
        base, size = int(self.base_B[b]), self.page_size
        return torch.tensor(
            [
                int(self.page_table_BP[b, p // size]) * size + p % size
                if p < base
                else int(self.path_RD[r, p - base])
                for p in range(first, last + 1)
            ],
            dtype=torch.int64,
        )


def attend_rows(
    q_RND: Tensor,
    k_SKD: Tensor,
    v_SKD: Tensor,
    keys: VisibleKeys,
    first: int,
    scale: float,
    *,
    double: bool = False,
    scale_2KS: Tensor | None = None,
) -> Tensor:
    rows, heads, _ = q_RND.shape
    group = heads // k_SKD.shape[1]
    dtype = torch.float64 if double else q_RND.dtype
    out_RND = torch.zeros_like(q_RND, dtype=dtype)
    for r in range(rows):
        kv_slots = keys.kv_slots(r, first)
        if not len(kv_slots):
            continue
        k, v = k_SKD[kv_slots].to(dtype), v_SKD[kv_slots].to(dtype)
        if scale_2KS is not None:
            k_scale, v_scale = scale_2KS[:, :, kv_slots].to(dtype).transpose(1, 2)
            k, v = k * k_scale[:, :, None], v * v_scale[:, :, None]
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        weight = torch.softmax(torch.einsum("nd,tnd->nt", q_RND[r].to(dtype), k) * scale, dim=-1)
        out_RND[r] = torch.einsum("nt,tnd->nd", weight, v)
    return out_RND


def add_lora(
    x_MK: Tensor,
    a_SXK: Tensor,
    b_SNr: Tensor,
    scale_S: Tensor,
    parts: tuple[int, ...],
    slot_M: Tensor,
    out_MN: Tensor,
) -> Tensor:
    """`slot_M`: the slot of each row's adapter; -1 for none."""
    rank, found_MN = b_SNr.shape[2], out_MN.clone()
    for m, slot in enumerate(slot_M.tolist()):
        if slot < 0:
            continue
        low_X = scale_S[slot] * (a_SXK[slot] @ x_MK[m])
        b_parts = b_SNr[slot].split(list(parts))
        added = [b @ low_X[i * rank : (i + 1) * rank] for i, b in enumerate(b_parts)]
        found_MN[m] += torch.cat(added)
    return found_MN


MASK = np.uint64(0xFFFFFFFF)


def philox4x32(key: tuple[int, int], counter: tuple[np.ndarray | int, ...]) -> list[np.ndarray]:
    """Return the four words of Philox-4x32-10 on arrays of counters, in uint64 arithmetic, each a
    uint64 below 2^32.
    """
    c = [np.asarray(word, dtype=np.uint64) & MASK for word in counter]
    k = [key[0], key[1]]
    for _ in range(10):
        left, right = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = [
            (right >> np.uint64(32)) ^ c[1] ^ np.uint64(k[0]),
            right & MASK,
            (left >> np.uint64(32)) ^ c[3] ^ np.uint64(k[1]),
            left & MASK,
        ]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


def gumbel(seed: int, tokens: np.ndarray, position: int) -> np.ndarray:
    """Return G(seed, token, position) for an array of token ids: float64 throughout, rounded to
    float32 at the end.
    """
    tokens = np.asarray(tokens, dtype=np.int64)
    words = np.stack(philox4x32((seed % 2**32, seed >> 32), (tokens >> 2, position, 0, 0)))
    words = np.broadcast_to(
        words.reshape(4, -1) if words.ndim > 1 else words[:, None], (4, tokens.size)
    )
    x = words[tokens.ravel() & 3, np.arange(tokens.size)].astype(np.float64)
    u = np.minimum((x + 0.5) * 2.0**-32, 1.0 - 2.0**-24)
    return (-np.log(-np.log1p(-u))).astype(np.float32).reshape(tokens.shape)


def edited(
    logits: np.ndarray,
    bias: dict[int, float],
    prompt: list[int],
    output: list[int],
    repetition: float,
    presence: float,
    frequency: float,
    masked: list[int],
    allowed: Sequence[int] = (),
) -> np.ndarray:
    """Apply bias, then the repetition penalty, then presence and frequency, then the mask and what
    is allowed (empty: all), one token at a time in float32.
    """
    result = logits.astype(np.float32).copy()
    for token, value in bias.items():
        result[token] = result[token] + np.float32(value)
    for token in sorted({*prompt, *output}):
        x = result[token]
        x = x / np.float32(repetition) if x > 0 else x * np.float32(repetition)
        if token in output:
            x = x - (np.float32(frequency) * np.float32(output.count(token)) + np.float32(presence))
        result[token] = x
    result[masked] = -np.inf
    if allowed:
        result[[token for token in range(len(result)) if token not in allowed]] = -np.inf
    return result


def log_softmax(z: np.ndarray) -> np.ndarray:
    """Return float64 log-probs; -inf stays -inf."""
    shifted = z.astype(np.float64) - np.float64(z.max())
    return shifted - np.log(np.exp(shifted).sum())


def sample(
    logits: np.ndarray, temperature: float, filters: Filters, noise: np.ndarray
) -> tuple[int, np.ndarray, float]:
    """Sample one row: return the token, the float64 log-probs of the processed distribution, and
    the distance that `Filters.kept` returns. Temperature 0 is greedy.
    """
    if temperature == 0:
        return int(np.argmax(logits)), log_softmax(logits), np.inf
    z = logits / np.float32(temperature)
    keep, distance = filters.kept(z)
    z = np.where(keep, z, np.float32(-np.inf))
    return int(np.argmax(z + noise)), log_softmax(z), distance
