"""One pack's losses and gradients, in segments: each unrolled step forward, chunks of the loss,
each step backward.

The graph is cut between segments: a step reads detached inputs, and its output's gradient is filled
in later, so a trainer can stop between any two segments and keep all finished work. Logits exist
for one chunk of slots at a time, forward and backward together. Losses are sums, so a pack's losses
are the sums over its documents. For slots before a document's first root, such as prompts, only
keys and values are computed.

Legend: N slots, R slots from a document's first root on, H hidden, A query heads, K KV heads, D
head width, C draft vocabulary, S unrolled steps, M slots of a chunk, L = S x M.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding

from tlt_server.models.training_memory import CHUNK_LOGITS
from tlt_server.trainer.learning.attend import Trunk, attend, trunk_of
from tlt_server.trainer.learning.network import Frozen, TrainableDrafter
from tlt_server.trainer.learning.objectives import (
    Objective,
    feature_distance,
    slot_weights,
    teacher_probabilities,
)
from tlt_server.trainer.learning.pack import Pack


class Sums(NamedTuple):
    """Totals over slots, by unrolled step; float64 on the device."""

    loss_S: Tensor
    weight_S: Tensor
    agreed_S: Tensor  # where draft and target have the same most likely token

    @classmethod
    def zero(cls, steps: int, device: torch.device) -> Sums:
        return cls(*(torch.zeros(steps, dtype=torch.float64, device=device) for _ in range(3)))


@dataclass
class Unrolled:
    """One step's graph and its cut ends. The first step's input, keys and values cover all slots,
    later ones' R slots.
    """

    g_NH: Tensor  # its input
    h_RH: Tensor
    k_NKD: Tensor
    v_NKD: Tensor
    k_cut: Tensor  # what later steps read, gathering gradients
    v_cut: Tensor
    grad_RH: Tensor  # gradient of h_RH


class DraftedSlots(NamedTuple):
    """The slots from a document's first root on."""

    slot_R: Tensor
    row_N: Tensor  # place of such a slot among them

    @classmethod
    def of(cls, pack: Pack, device: torch.device) -> DraftedSlots:
        ends = zip(pack.first_queries(), pack.bounds[1:], strict=True)
        slot_R = torch.cat([torch.arange(first, end) for first, end in ends])
        row_N = torch.zeros(len(pack), dtype=torch.int64)
        row_N[slot_R] = torch.arange(len(slot_R))
        return cls(slot_R.to(device), row_N.to(device))


def weights_of(frozen: Frozen, pack: Pack, steps: int) -> Tensor:
    """Return weights [S, N] of every slot and step. The predicted token must be in the response and
    in the draft vocabulary; no training can help with other tokens.
    """
    predicted_N = pack.counted_N & frozen.drafted_V[pack.token_N]
    return torch.stack(
        [slot_weights(pack.root_N, predicted_N, pack.left_N, step) for step in range(steps)]
    )


def forward(
    network: TrainableDrafter,
    frozen: Frozen,
    pack: Pack,
    trunk: Trunk,
    before: list[Unrolled],
    slot_R: Tensor | None = None,
) -> Unrolled:
    """Run the next unrolled step after `before`. `slot_R`: the slots to run, which are the queries
    of `trunk`; None: all.
    """
    step = len(before)
    token_N, position_N = pack.token_N.roll(-step), pack.position_N + step
    if step:
        g_NH = before[-1].h_RH.detach().requires_grad_()
        if slot_R is not None:
            token_N, position_N = token_N[slot_R], position_N[slot_R]
    else:
        g_NH = network.fuse(pack.feature_NF)
    embedded_NH = embedding(token_N, frozen.embedding_VH)
    queries_R = None if step else slot_R

    def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        trunk_k, trunk_v = (before[0].k_cut, before[0].v_cut) if step else (k, v)
        branch_k = [each.k_cut for each in before[1:]] + [k] * (step > 0)
        branch_v = [each.v_cut for each in before[1:]] + [v] * (step > 0)
        return attend(trunk, network.compute, q, trunk_k, trunk_v, branch_k, branch_v)

    h_RH, k, v = network.draft(embedded_NH, g_NH, position_N, attended, queries_R)
    k_cut, v_cut = (x.detach().requires_grad_() for x in (k, v))
    return Unrolled(g_NH, h_RH, k, v, k_cut, v_cut, torch.zeros_like(h_RH))


def accumulate(
    network: TrainableDrafter,
    frozen: Frozen,
    objective: Objective,
    pack: Pack,
    factor_S: Tensor,
    sums: Sums,
) -> Iterator[str]:
    """Add a pack's gradients of sum_s factor_s * loss_s to the weights' `grad`, and its totals to
    `sums`. Yields after each segment.
    """
    trunk = trunk_of(pack.bounds, network.device, network.compute, pack.first_queries())
    weight_SN = weights_of(frozen, pack, objective.steps)
    drafted, steps = DraftedSlots.of(pack, network.device), list[Unrolled]()
    for _ in range(objective.steps):
        steps.append(forward(network, frozen, pack, trunk, steps, drafted.slot_R))
        yield "forward"
    size = max(16, CHUNK_LOGITS // (network.draft_vocab_size * len(steps)))
    for spans in chunks(pack.roots, size):
        _chunk(
            network, frozen, objective, pack, steps, spans, drafted.row_N, weight_SN, factor_S, sums
        )
        yield "loss"
    while steps:
        _backward(steps)
        yield "backward"


def chunks(spans: Sequence[tuple[int, int]], size: int) -> Iterator[list[tuple[int, int]]]:
    """Cut spans of slots into chunks of `size` slots. Each chunk computes the gradient of the whole
    head, so short documents share one.
    """
    chunk: list[tuple[int, int]] = []
    room = size
    for start, stop in spans:
        while start < stop:
            end = min(stop, start + room)
            chunk.append((start, end))
            room -= end - start
            start = end
            if not room:
                yield chunk
                chunk, room = [], size
    if chunk:
        yield chunk


def _chunk(
    network: TrainableDrafter,
    frozen: Frozen,
    objective: Objective,
    pack: Pack,
    steps: list[Unrolled],
    spans: Sequence[tuple[int, int]],
    row_N: Tensor,
    weight_SN: Tensor,
    factor_S: Tensor,
    sums: Sums,
) -> None:
    """Add the loss of some spans over all steps, and its gradient with respect to each step's
    output. The steps share one matmul with the head, so its gradient is added once.
    """
    # The teacher says what follows a slot's last step, too: a span reads that many slots more.
    read = [torch.arange(start, stop + len(steps)) for start, stop in spans]
    first = torch.tensor([0, *(len(part) for part in read[:-1])]).cumsum(0).tolist()
    at_M = torch.cat(
        [at + torch.arange(stop - start) for at, (start, stop) in zip(first, spans, strict=True)]
    )
    index, at_M = (torch.cat(read) % len(pack)).to(network.device), at_M.to(network.device)
    at_SM = torch.arange(len(steps), device=network.device)[:, None] + at_M  # within `index`
    slots = index[at_M]
    weight_SM, rows = weight_SN[:, slots], row_N[slots]
    with torch.no_grad():
        teacher_MC = teacher_probabilities(pack.teacher_NH[index], frozen.head_CH)
        teacher_LC = teacher_MC[at_SM.flatten()]
    h_LH = torch.cat([each.h_RH[rows] for each in steps]).detach().requires_grad_()
    logits_LC = network.logits(h_LH, frozen)
    loss_L = objective.token_loss(logits_LC, teacher_LC)
    if objective.feature_weight:
        following_LH = steps[0].g_NH.detach()[index[at_SM.flatten() + 1]]
        loss_L = loss_L + objective.feature_weight * feature_distance(h_LH, following_LH)
    loss_S = (loss_L.view_as(weight_SM) * weight_SM).sum(1)
    (loss_S * factor_S).sum().backward()
    assert h_LH.grad is not None
    for each, grad_MH in zip(steps, h_LH.grad.chunk(len(steps)), strict=True):
        each.grad_RH[rows] = grad_MH
    agreed_L = logits_LC.detach().argmax(-1) == teacher_LC.argmax(-1)
    sums.loss_S.add_(loss_S.detach())
    sums.weight_S.add_(weight_SM.sum(1))
    sums.agreed_S.add_((weight_SM * agreed_L.view_as(weight_SM)).sum(1))


def _backward(steps: list[Unrolled]) -> None:
    """Run the backward of the last remaining step, and pass its input's gradient to the step
    before.
    """
    last = steps.pop()
    ends = [last.h_RH, last.k_NKD, last.v_NKD]
    grads = [last.grad_RH, last.k_cut.grad, last.v_cut.grad]
    live = [(end, grad) for end, grad in zip(ends, grads, strict=True) if grad is not None]
    torch.autograd.backward([end for end, _ in live], [grad for _, grad in live])
    if steps:
        assert last.g_NH.grad is not None
        steps[-1].grad_RH += last.g_NH.grad
