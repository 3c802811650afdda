"""Slow twins of the kernels in plain PyTorch: what each kernel means, with no regard for speed or
order of summation.

The tests compare every kernel with its twin. Arguments are those of the kernel; see
`cpu/elementwise.py` and `cpu/attention.py` for shapes. Where `double` is true the arithmetic is
float64, to serve as ground truth.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


def rms_norm(x_RH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    return weight_H * (x_RH * torch.rsqrt(x_RH.pow(2).mean(-1, keepdim=True) + eps))


def add_rms_norm(x_RH: Tensor, residual_RH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    residual_RH += x_RH
    return rms_norm(residual_RH, weight_H, eps)


def leaf_sums(x_MK: Tensor, weight_NK: Tensor, leaf: int) -> Tensor:
    """Return x @ weight^T over each leaf of K, [L, M, N]."""
    both = zip(x_MK.split(leaf, dim=1), weight_NK.split(leaf, dim=1), strict=True)
    return torch.stack([x @ weight.T for x, weight in both])


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
    eps: float = 0.0,
) -> Tensor:
    kv_heads, width = k_SKD.shape[1:]
    q, k, v = qkv_RX.view(len(qkv_RX), -1, width).split([heads, kv_heads, kv_heads], dim=1)
    if q_weight_D is not None:
        q = rms_norm(q, q_weight_D, eps)
    if k_weight_D is not None:
        k = rms_norm(k, k_weight_D, eps)
    cos, sin = cos_PD2[position_R], sin_PD2[position_R]
    k_SKD[kv_slot_R] = rotate(k, cos, sin)
    v_SKD[kv_slot_R] = v
    return rotate(q, cos, sin)


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
) -> Tensor:
    rows, heads, _ = q_RND.shape
    group = heads // k_SKD.shape[1]
    dtype = torch.float64 if double else q_RND.dtype
    out_RND = torch.zeros_like(q_RND, dtype=dtype)
    for r in range(rows):
        kv_slots = keys.kv_slots(r, first)
        if not len(kv_slots):
            continue
        k = k_SKD[kv_slots].to(dtype).repeat_interleave(group, dim=1)
        v = v_SKD[kv_slots].to(dtype).repeat_interleave(group, dim=1)
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
