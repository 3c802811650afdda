"""Attention of an unrolled step: a query at root r sees the trunk keys of its own document up to r,
and the keys of its own branch, one per step since.

The trunk part runs in blocks of one document (or as one varlen flash-attention call) and returns
its log-sum-exp; the branch part is one score per step and slot; the two are merged by their
log-sum-exps. No mask over the whole pack exists. The backward pass gives the merged output and
log-sum-exp to the trunk's own backward pass, which makes its gradients those of the merged softmax.

Legend: N slots, A query heads, K KV heads, G = A / K, D head width, J branch steps, Q queries and S
keys of a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

BLOCK = 256  # queries of a block: bounds its scores to 256 x the document's length


class Attended(NamedTuple):
    out_NAD: Tensor
    lse_NA: Tensor  # float32, natural log


class Trunk(Protocol):
    """Causal attention within each document of a pack, without autograd."""

    def forward(self, q_NAD: Tensor, k_NKD: Tensor, v_NKD: Tensor) -> Attended: ...

    def backward(
        self, grad_NAD: Tensor, q_NAD: Tensor, k_NKD: Tensor, v_NKD: Tensor, attended: Attended
    ) -> tuple[Tensor, Tensor, Tensor]: ...


class Blocks:
    """The trunk in plain matmuls, document by document: any device and dtype, fixed order."""

    def __init__(self, bounds: Sequence[int]) -> None:
        """`bounds`: first slot of each document, and the end of the last."""
        self._bounds = tuple(bounds)

    def forward(self, q_NAD: Tensor, k_NKD: Tensor, v_NKD: Tensor) -> Attended:
        out_NAD = torch.empty_like(q_NAD)
        lse_NA = torch.empty(q_NAD.shape[:2], dtype=torch.float32, device=q_NAD.device)
        for start, first, stop in self._blocks():
            score_KGQS = _scores(q_NAD[first:stop], k_NKD[start:stop], first - start)
            lse_KGQ = score_KGQS.logsumexp(-1)
            weight_KGQS = (score_KGQS - lse_KGQ[..., None]).exp()
            value_KSD = v_NKD[start:stop].transpose(0, 1).float()
            out_KGQD = weight_KGQS @ value_KSD[:, None]
            out_NAD[first:stop] = _rows(out_KGQD).to(out_NAD.dtype)
            lse_NA[first:stop] = lse_KGQ.flatten(0, 1).t()
        return Attended(out_NAD, lse_NA)

    def backward(
        self, grad_NAD: Tensor, q_NAD: Tensor, k_NKD: Tensor, v_NKD: Tensor, attended: Attended
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq_NAD = torch.empty_like(q_NAD)
        dk_NKD, dv_NKD = (torch.zeros_like(x, dtype=torch.float32) for x in (k_NKD, v_NKD))
        groups, scale = q_NAD.shape[1] // k_NKD.shape[1], q_NAD.shape[2] ** -0.5
        delta_NA = _delta(grad_NAD, attended.out_NAD)
        for start, first, stop in self._blocks():
            own, keys = slice(first, stop), slice(start, stop)
            score_KGQS = _scores(q_NAD[own], k_NKD[keys], first - start)
            lse_KGQ, delta_KGQ = (
                x[own].t().unflatten(0, (-1, groups)) for x in (attended.lse_NA, delta_NA)
            )
            weight_KGQS = (score_KGQS - lse_KGQ[..., None]).exp()
            grad_KGQD, query_KGQD = (_heads(x[own], groups) for x in (grad_NAD, q_NAD))
            key_KSD, value_KSD = (x[keys].transpose(0, 1).float() for x in (k_NKD, v_NKD))
            rise_KGQS = grad_KGQD @ value_KSD[:, None].transpose(-1, -2) - delta_KGQ[..., None]
            slope_KGQS = weight_KGQS * rise_KGQS * scale
            dq_NAD[own] = _rows(slope_KGQS @ key_KSD[:, None]).to(dq_NAD.dtype)
            folded = slope_KGQS.flatten(1, 2).transpose(1, 2)
            dk_NKD[keys] += (folded @ query_KGQD.flatten(1, 2)).transpose(0, 1)
            folded = weight_KGQS.flatten(1, 2).transpose(1, 2)
            dv_NKD[keys] += (folded @ grad_KGQD.flatten(1, 2)).transpose(0, 1)
        return dq_NAD, dk_NKD, dv_NKD

    def _blocks(self) -> Iterator[tuple[int, int, int]]:
        """Yield (the document's first slot, first query, end of queries)."""
        for start, end in zip(self._bounds, self._bounds[1:], strict=False):
            for first in range(start, end, BLOCK):
                yield start, first, min(first + BLOCK, end)


class Flash:
    """The trunk by torch's varlen flash attention: CUDA, bfloat16 or float16."""

    def __init__(self, bounds: Sequence[int], device: torch.device) -> None:
        self._starts = torch.tensor(list(bounds), dtype=torch.int32, device=device)
        self._longest = max(b - a for a, b in zip(bounds, bounds[1:], strict=False))

    def forward(self, q_NAD: Tensor, k_NKD: Tensor, v_NKD: Tensor) -> Attended:
        out_NAD, lse_AN, self._seed, self._unused, _ = torch.ops.aten._flash_attention_forward(
            q_NAD, k_NKD, v_NKD, *self._where(), 0.0, True, False
        )
        assert lse_AN.shape == (q_NAD.shape[1], len(q_NAD)), f"log-sum-exp is {lse_AN.shape}"
        return Attended(out_NAD, lse_AN.t())

    def backward(
        self, grad_NAD: Tensor, q_NAD: Tensor, k_NKD: Tensor, v_NKD: Tensor, attended: Attended
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq_NAD, dk_NKD, dv_NKD = torch.ops.aten._flash_attention_backward(
            grad_NAD.to(q_NAD.dtype).contiguous(),
            q_NAD,
            k_NKD,
            v_NKD,
            attended.out_NAD.to(q_NAD.dtype).contiguous(),
            attended.lse_NA.t().contiguous(),
            *self._where(),
            0.0,
            True,
            self._seed,
            self._unused,
        )
        return dq_NAD, dk_NKD, dv_NKD

    def _where(self) -> tuple[Tensor, Tensor, int, int]:
        return self._starts, self._starts, self._longest, self._longest


def trunk_of(bounds: Sequence[int], device: torch.device, dtype: torch.dtype) -> Trunk:
    """Return the fastest trunk that this device and compute dtype have."""
    if device.type == "cuda" and dtype in (torch.bfloat16, torch.float16):
        return Flash(bounds, device)
    return Blocks(bounds)


def attend(
    trunk: Trunk,
    dtype: torch.dtype,
    q_NAD: Tensor,
    k_NKD: Tensor,
    v_NKD: Tensor,
    branch_k: Sequence[Tensor] = (),
    branch_v: Sequence[Tensor] = (),
) -> Tensor:
    """Return [N, A, D] in float32: each slot over its document's trunk and its own branch.

    k_NKD, v_NKD: of the true slots. branch_k, branch_v: J tensors [N, K, D], key i of slot n being
    that of step i + 1 of root n. All are float32 and take gradients; products run in `dtype`.
    """
    assert len(branch_k) == len(branch_v)
    result: Tensor = _Merged.apply(trunk, dtype, q_NAD, k_NKD, v_NKD, *branch_k, *branch_v)  # type: ignore[no-untyped-call]
    return result


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, trunk: Trunk, dtype: torch.dtype, q_NAD: Tensor, *tensors: Tensor
    ) -> Tensor:
        q, k, v, *branch = (x.to(dtype) for x in (q_NAD, *tensors))
        out_NAD, lse_NA = trunk.forward(q, k, v)
        out_NAD = out_NAD.float()
        if branch:
            score_NAJ, value_NJAD = _branch_scores(q, branch)
            both_NA = torch.logaddexp(lse_NA, score_NAJ.logsumexp(-1))
            out_NAD = out_NAD * (lse_NA - both_NA).exp()[..., None] + torch.einsum(
                "naj,njad->nad", (score_NAJ - both_NA[..., None]).exp(), value_NJAD
            )
            lse_NA = both_NA
        ctx.trunk = trunk
        ctx.save_for_backward(q, k, v, out_NAD, lse_NA, *branch)
        return out_NAD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, out_NAD, lse_NA, *branch = ctx.saved_tensors
        (grad_NAD,) = grads
        found = ctx.trunk.backward(grad_NAD, q, k, v, Attended(out_NAD, lse_NA))
        dq_NAD, dk_NKD, dv_NKD = (x.float() for x in found)
        below: list[Tensor] = []
        if branch:
            score_NAJ, value_NJAD = _branch_scores(q, branch)
            weight_NAJ = (score_NAJ - lse_NA[..., None]).exp()
            rise_NAJ = torch.einsum("nad,njad->naj", grad_NAD, value_NJAD)
            rise_NAJ -= _delta(grad_NAD, out_NAD)[..., None]
            slope_NAJ = weight_NAJ * rise_NAJ * q.shape[2] ** -0.5
            key_NJAD = _spread(branch[: len(branch) // 2], q.shape[1])
            dq_NAD = dq_NAD + torch.einsum("naj,njad->nad", slope_NAJ, key_NJAD)
            for share_NAJ, by_NAD in ((slope_NAJ, q.float()), (weight_NAJ, grad_NAD)):
                each_NAJD = share_NAJ[..., None] * by_NAD[:, :, None]
                below += each_NAJD.unflatten(1, (k.shape[1], -1)).sum(2).unbind(2)
        return None, None, dq_NAD, dk_NKD, dv_NKD, *below


def _branch_scores(q_NAD: Tensor, branch: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return scaled scores [N, A, J] and values [N, J, A, D] of a branch's keys and values."""
    steps = len(branch) // 2
    key_NJAD, value_NJAD = (
        _spread(half, q_NAD.shape[1]) for half in (branch[:steps], branch[steps:])
    )
    score_NAJ = torch.einsum("nad,njad->naj", q_NAD.float(), key_NJAD) * q_NAD.shape[2] ** -0.5
    return score_NAJ, value_NJAD


def _spread(branch: Sequence[Tensor], heads: int) -> Tensor:
    """Stack J tensors [N, K, D] and repeat each KV head for its query heads: [N, J, A, D]."""
    stacked_NJKD = torch.stack(list(branch), 1).float()
    return stacked_NJKD.repeat_interleave(heads // stacked_NJKD.shape[2], 2)


def _scores(q_QAD: Tensor, k_SKD: Tensor, known: int) -> Tensor:
    """Scaled float32 scores [K, G, Q, S], -inf where a key follows its query. `known` keys precede
    the first query.
    """
    query_KGQD = _heads(q_QAD, q_QAD.shape[1] // k_SKD.shape[1])
    key_KSD = k_SKD.transpose(0, 1).float()
    score_KGQS = query_KGQD @ key_KSD[:, None].transpose(-1, -2) * q_QAD.shape[2] ** -0.5
    later_QS = torch.ones(score_KGQS.shape[-2:], dtype=torch.bool, device=score_KGQS.device).triu(
        known + 1
    )
    return score_KGQS.masked_fill_(later_QS, float("-inf"))


def _heads(x_QAD: Tensor, groups: int) -> Tensor:
    """[Q, A, D] as float32 [K, G, Q, D]."""
    return x_QAD.float().transpose(0, 1).unflatten(0, (-1, groups))


def _rows(x_KGQD: Tensor) -> Tensor:
    return x_KGQD.flatten(0, 1).transpose(0, 1)


def _delta(grad_NAD: Tensor, out_NAD: Tensor) -> Tensor:
    return (grad_NAD.float() * out_NAD.float()).sum(-1)
