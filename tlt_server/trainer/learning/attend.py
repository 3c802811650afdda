"""Attention of an unrolled step. A query at root r sees the trunk keys of its document up to r, and
one branch key for each step since. Some slots have queries, up to the end of their document; all
slots have trunk keys.

The trunk part runs in blocks of one document (or as one varlen flash-attention call) and returns
its log-sum-exp; the branch part is one score per step and slot; their log-sum-exps merge the two.
No mask over the whole pack exists. The backward pass gives the merged output and log-sum-exp to the
trunk's own backward pass, so its gradients are those of the merged softmax.

Legend: N slots, M slots with a query, A query heads, K KV heads, G = A / K, D head width, J branch
steps, Q queries and S keys of a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

BLOCK = 256  # queries of a block: bounds its scores to 256 x the document's length


class Attended(NamedTuple):
    out_MAD: Tensor
    lse_MA: Tensor  # float32, natural log


class Trunk(Protocol):
    """Causal attention within each document of a pack, without autograd."""

    def forward(self, q_MAD: Tensor, k_NKD: Tensor, v_NKD: Tensor) -> Attended: ...

    def backward(
        self, grad_MAD: Tensor, q_MAD: Tensor, k_NKD: Tensor, v_NKD: Tensor, attended: Attended
    ) -> tuple[Tensor, Tensor, Tensor]: ...


class Blocks:
    """The trunk in plain matmuls, document by document: any device and dtype, fixed order."""

    def __init__(self, bounds: Sequence[int], first: Sequence[int] | None = None) -> None:
        """`bounds`: the first slot of each document, and the end of the last. `first`: each
        document's first slot with a query; None: all slots have one.
        """
        self._bounds, self._first = tuple(bounds), tuple(first or bounds[:-1])

    def forward(self, q_MAD: Tensor, k_NKD: Tensor, v_NKD: Tensor) -> Attended:
        out_MAD = torch.empty_like(q_MAD)
        lse_MA = torch.empty(q_MAD.shape[:2], dtype=torch.float32, device=q_MAD.device)
        for own, keys, known in self._blocks():
            score_KGQS = _scores(q_MAD[own], k_NKD[keys], known)
            lse_KGQ = score_KGQS.logsumexp(-1)
            weight_KGQS = (score_KGQS - lse_KGQ[..., None]).exp()
            value_KSD = v_NKD[keys].transpose(0, 1).float()
            out_KGQD = weight_KGQS @ value_KSD[:, None]
            out_MAD[own] = _rows(out_KGQD).to(out_MAD.dtype)
            lse_MA[own] = lse_KGQ.flatten(0, 1).t()
        return Attended(out_MAD, lse_MA)

    def backward(
        self, grad_MAD: Tensor, q_MAD: Tensor, k_NKD: Tensor, v_NKD: Tensor, attended: Attended
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq_MAD = torch.empty_like(q_MAD)
        dk_NKD, dv_NKD = (torch.zeros_like(x, dtype=torch.float32) for x in (k_NKD, v_NKD))
        groups, scale = q_MAD.shape[1] // k_NKD.shape[1], q_MAD.shape[2] ** -0.5
        delta_MA = _delta(grad_MAD, attended.out_MAD)
        for own, keys, known in self._blocks():
            score_KGQS = _scores(q_MAD[own], k_NKD[keys], known)
            lse_KGQ, delta_KGQ = (
                x[own].t().unflatten(0, (-1, groups)) for x in (attended.lse_MA, delta_MA)
            )
            weight_KGQS = (score_KGQS - lse_KGQ[..., None]).exp()
            grad_KGQD, query_KGQD = (_heads(x[own], groups) for x in (grad_MAD, q_MAD))
            key_KSD, value_KSD = (x[keys].transpose(0, 1).float() for x in (k_NKD, v_NKD))
            rise_KGQS = grad_KGQD @ value_KSD[:, None].transpose(-1, -2) - delta_KGQ[..., None]
            slope_KGQS = weight_KGQS * rise_KGQS * scale
            dq_MAD[own] = _rows(slope_KGQS @ key_KSD[:, None]).to(dq_MAD.dtype)
            folded = slope_KGQS.flatten(1, 2).transpose(1, 2)
            dk_NKD[keys] += (folded @ query_KGQD.flatten(1, 2)).transpose(0, 1)
            folded = weight_KGQS.flatten(1, 2).transpose(1, 2)
            dv_NKD[keys] += (folded @ grad_KGQD.flatten(1, 2)).transpose(0, 1)
        return dq_MAD, dk_NKD, dv_NKD

    def _blocks(self) -> Iterator[tuple[slice, slice, int]]:
        """Yield slices of queries, the slice of keys that they see, and the number of keys before
        all of them.
        """
        at = 0
        for start, root, end in zip(self._bounds, self._first, self._bounds[1:], strict=False):
            for first in range(root, end, BLOCK):
                stop = min(first + BLOCK, end)
                yield slice(at, at + stop - first), slice(start, stop), first - start
                at += stop - first


class Flash:
    """The trunk by torch's varlen flash attention: CUDA, bfloat16 or float16."""

    def __init__(
        self, bounds: Sequence[int], device: torch.device, first: Sequence[int] | None = None
    ) -> None:
        """`bounds`, `first`: see `Blocks`. The kernels align queries with a document's end."""
        queries = [b - a for a, b in zip(first or bounds[:-1], bounds[1:], strict=True)]
        assert min(queries) > 0, "a document without a query"
        starts = [0, *accumulate(queries)], list(bounds)
        self._starts = [torch.tensor(x, dtype=torch.int32, device=device) for x in starts]
        # With one query each, the forward kernel would change the shape of its results.
        longest = max(b - a for a, b in zip(bounds, bounds[1:], strict=False))
        self._longest = max(2, *queries), longest

    def forward(self, q_MAD: Tensor, k_NKD: Tensor, v_NKD: Tensor) -> Attended:
        out_MAD, lse_AN, self._seed, self._unused, _ = torch.ops.aten._flash_attention_forward(
            q_MAD, k_NKD, v_NKD, *self._where(), 0.0, True, False
        )
        assert lse_AN.shape == (q_MAD.shape[1], len(q_MAD)), f"log-sum-exp is {lse_AN.shape}"
        return Attended(out_MAD, lse_AN.t())

    def backward(
        self, grad_MAD: Tensor, q_MAD: Tensor, k_NKD: Tensor, v_NKD: Tensor, attended: Attended
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq_MAD, dk_NKD, dv_NKD = torch.ops.aten._flash_attention_backward(
            grad_MAD.to(q_MAD.dtype).contiguous(),
            q_MAD,
            k_NKD,
            v_NKD,
            attended.out_MAD.to(q_MAD.dtype).contiguous(),
            attended.lse_MA.t().contiguous(),
            *self._where(),
            0.0,
            True,
            self._seed,
            self._unused,
        )
        return dq_MAD, dk_NKD, dv_NKD

    def _where(self) -> tuple[Tensor, Tensor, int, int]:
        return *self._starts, *self._longest  # type: ignore[return-value]


def trunk_of(
    bounds: Sequence[int],
    device: torch.device,
    dtype: torch.dtype,
    first: Sequence[int] | None = None,
) -> Trunk:
    """Return the fastest trunk for this device and compute dtype."""
    if device.type == "cuda" and dtype in (torch.bfloat16, torch.float16):
        return Flash(bounds, device, first)
    return Blocks(bounds, first)


def attend(
    trunk: Trunk,
    dtype: torch.dtype,
    q_MAD: Tensor,
    k_NKD: Tensor,
    v_NKD: Tensor,
    branch_k: Sequence[Tensor] = (),
    branch_v: Sequence[Tensor] = (),
) -> Tensor:
    """Return [M, A, D] in float32: the attention of each query over its document's trunk and its
    branch.

    k_NKD, v_NKD: of the true slots. branch_k, branch_v: J tensors [M, K, D]; key i of query m
    belongs to step i + 1 of its root. All are float32 and get gradients; matmuls run in `dtype`.
    """
    assert len(branch_k) == len(branch_v)
    result: Tensor = _Merged.apply(trunk, dtype, q_MAD, k_NKD, v_NKD, *branch_k, *branch_v)  # type: ignore[no-untyped-call]
    return result


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, trunk: Trunk, dtype: torch.dtype, q_MAD: Tensor, *tensors: Tensor
    ) -> Tensor:
        q, k, v, *branch = (x.to(dtype) for x in (q_MAD, *tensors))
        out_MAD, lse_MA = trunk.forward(q, k, v)
        out_MAD = out_MAD.float()
        if branch:
            score_MAJ, value_MJAD = _branch_scores(q, branch)
            both_MA = torch.logaddexp(lse_MA, score_MAJ.logsumexp(-1))
            out_MAD = out_MAD * (lse_MA - both_MA).exp()[..., None] + torch.einsum(
                "maj,mjad->mad", (score_MAJ - both_MA[..., None]).exp(), value_MJAD
            )
            lse_MA = both_MA
        ctx.trunk = trunk
        ctx.save_for_backward(q, k, v, out_MAD, lse_MA, *branch)
        return out_MAD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, out_MAD, lse_MA, *branch = ctx.saved_tensors
        (grad_MAD,) = grads
        found = ctx.trunk.backward(grad_MAD, q, k, v, Attended(out_MAD, lse_MA))
        dq_MAD, dk_NKD, dv_NKD = (x.float() for x in found)
        below: list[Tensor] = []
        if branch:
            score_MAJ, value_MJAD = _branch_scores(q, branch)
            weight_MAJ = (score_MAJ - lse_MA[..., None]).exp()
            rise_MAJ = torch.einsum("mad,mjad->maj", grad_MAD, value_MJAD)
            rise_MAJ -= _delta(grad_MAD, out_MAD)[..., None]
            slope_MAJ = weight_MAJ * rise_MAJ * q.shape[2] ** -0.5
            key_MJAD = _spread(branch[: len(branch) // 2], q.shape[1])
            dq_MAD = dq_MAD + torch.einsum("maj,mjad->mad", slope_MAJ, key_MJAD)
            for share_MAJ, by_MAD in ((slope_MAJ, q.float()), (weight_MAJ, grad_MAD)):
                each_MAJD = share_MAJ[..., None] * by_MAD[:, :, None]
                below += each_MAJD.unflatten(1, (k.shape[1], -1)).sum(2).unbind(2)
        return None, None, dq_MAD, dk_NKD, dv_NKD, *below


def _branch_scores(q_MAD: Tensor, branch: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return scaled scores [M, A, J] and values [M, J, A, D] of a branch's keys and values."""
    steps = len(branch) // 2
    key_MJAD, value_MJAD = (
        _spread(half, q_MAD.shape[1]) for half in (branch[:steps], branch[steps:])
    )
    score_MAJ = torch.einsum("mad,mjad->maj", q_MAD.float(), key_MJAD) * q_MAD.shape[2] ** -0.5
    return score_MAJ, value_MJAD


def _spread(branch: Sequence[Tensor], heads: int) -> Tensor:
    """Stack J tensors [M, K, D] and repeat each KV head for its query heads: [M, J, A, D]."""
    stacked_MJKD = torch.stack(list(branch), 1).float()
    return stacked_MJKD.repeat_interleave(heads // stacked_MJKD.shape[2], 2)


def _scores(q_QAD: Tensor, k_SKD: Tensor, known: int) -> Tensor:
    """Return scaled float32 scores [K, G, Q, S], -inf where a key follows its query. `known`: the
    number of keys before the first query.
    """
    query_KGQD = _heads(q_QAD, q_QAD.shape[1] // k_SKD.shape[1])
    key_KSD = k_SKD.transpose(0, 1).float()
    score_KGQS = query_KGQD @ key_KSD[:, None].transpose(-1, -2) * q_QAD.shape[2] ** -0.5
    later_QS = torch.ones(score_KGQS.shape[-2:], dtype=torch.bool, device=score_KGQS.device).triu(
        known + 1
    )
    return score_KGQS.masked_fill_(later_QS, float("-inf"))


def _heads(x_QAD: Tensor, groups: int) -> Tensor:
    """Return [Q, A, D] as float32 [K, G, Q, D]."""
    return x_QAD.float().transpose(0, 1).unflatten(0, (-1, groups))


def _rows(x_KGQD: Tensor) -> Tensor:
    return x_KGQD.flatten(0, 1).transpose(0, 1)


def _delta(grad_MAD: Tensor, out_MAD: Tensor) -> Tensor:
    return (grad_MAD.float() * out_MAD.float()).sum(-1)
