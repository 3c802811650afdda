"""Objectives: what a drafter is trained to match, one table line each, and the losses of a slot.

An objective says how far a branch is unrolled, how its steps are weighted, and what a slot costs.
It may add one acceptance term over the whole draft vocabulary.

Legend: N slots, C draft vocabulary, F feature width, H hidden, K likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class Pairs(NamedTuple):
    """Aligned tensors of a document's slots r = 1 .. T-1; N = T-1."""

    token_N: Tensor
    """x_r: the token whose embedding enters the slot."""
    feature_NF: Tensor
    """Target feature of position r-1, which enters the slot. The next slot's is what EAGLE and HASS
    regress this slot's output on.
    """
    teacher_NH: Tensor
    """The target's last hidden state at position r: with the LM head the distribution of x_{r+1}.
    """
    counted_N: Tensor
    """Is x_r a token of the response?"""


def pair(tokens_T: Tensor, features_TF: Tensor, hidden_TH: Tensor, counted_T: Tensor) -> Pairs:
    """Align a document's tokens with the target's features and outputs, all by position: the one
    statement of the alignment, for training and inference alike.

    Slot r has (embedding of x_r, feature of position r-1) and predicts x_{r+1}; in EAGLE's words
    (embed x_{t+1}, h_t) -> h_{t+1}, x_{t+2}. Drafted `step` tokens after root r, it is slot r +
    step of the document, so the targets of a deeper step are the same array, shifted by `step`
    slots. The last slot predicts a token after the end; `slot_weights` leaves it out.
    """
    return Pairs(tokens_T[1:], features_TF[:-1], hidden_TH[1:], counted_T[1:])


def slot_weights(root_N: Tensor, predicted_N: Tensor, left_N: Tensor, step: int) -> Tensor:
    """Return weights [N] of roots drafted `step` tokens ahead.

    root_N: weight of a root, 0 if nothing is drafted there. predicted_N: whether a slot's token
    counts as predicted. It must be in the root's document, in which `left_N` more slots follow.
    """
    return root_N * (predicted_N.roll(-1 - step) & (left_N > step))


def teacher_probabilities(hidden_NH: Tensor, head_CH: Tensor) -> Tensor:
    """Return the target's distribution over the draft vocabulary, float32 [N, C], renormalised to
    sum to 1. `head_CH`: the LM head's rows of the draft vocabulary.
    """
    return functional.linear(hidden_NH.to(head_CH.dtype), head_CH).float().softmax(-1)


def soft_cross_entropy(logits_NC: Tensor, teacher_NC: Tensor) -> Tensor:
    """Return -sum_v p_v log q_v, [N]."""
    return -(teacher_NC * logits_NC.float().log_softmax(-1)).sum(-1)


def total_variation(logits_NC: Tensor, teacher_NC: Tensor) -> Tensor:
    """Return 1/2 sum_v |p_v - q_v|, [N]: one minus the best possible acceptance probability of a
    single draft.
    """
    return 0.5 * (teacher_NC - logits_NC.float().softmax(-1)).abs().sum(-1)


def shared_noise_refusal(logits_NC: Tensor, teacher_NC: Tensor) -> Tensor:
    """Return one minus the probability that draft and target choose the same token under one Gumbel
    noise, [N].

    With exponential E_j the target (p) chooses argmin E_j / p_j and the draft (q) argmin E_j / q_j,
    which is Gumbel-max. Both choose i if E_j >= E_i m_ij for all j != i, with m_ij = max(p_j / p_i,
    q_j / q_i). Given E_i = e, this has probability exp(-e sum_{j != i} m_ij), and the mean over e
    is 1 / (1 + sum_{j != i} m_ij) = 1 / sum_j m_ij, as m_ii = 1. So

        acceptance = sum_i 1 / sum_j max(p_j / p_i, q_j / q_i).

    q_j / q_i is the larger of the two exactly where q_j / p_j >= q_i / p_i. With tokens sorted by q
    / p the inner sum is therefore P_i / p_i + Q_i / q_i, where P_i sums p over the tokens before i
    and Q_i sums q from i on: O(C log C) instead of O(C^2). At equal ratios both forms agree, so the
    order of ties is free, and the order is constant where the gradient exists.
    """
    log_q_NC = logits_NC.float().log_softmax(-1)
    # A ratio of two zeros has no order, so p is kept above zero there.
    ratio_NC = log_q_NC.detach() - teacher_NC.clamp(min=torch.finfo(torch.float32).tiny).log()
    order_NC = ratio_NC.argsort(-1)
    p_NC, q_NC = teacher_NC.gather(-1, order_NC), log_q_NC.gather(-1, order_NC).exp()
    before_NC = p_NC.cumsum(-1) - p_NC
    onward_NC = q_NC.flip(-1).cumsum(-1).flip(-1)
    both_NC = p_NC * q_NC
    share_NC = both_NC / (before_NC * q_NC + onward_NC * p_NC).clamp(min=1e-30)
    return 1 - share_NC.sum(-1)


def top_cross_entropy(logits_NC: Tensor, teacher_NC: Tensor, count: int) -> Tensor:
    """Return the cross-entropy over only the teacher's `count` likeliest tokens, [N]: HASS's
    distillation of acceptable tokens (arXiv 2408.15766).
    """
    top_NK, index_NK = teacher_NC.topk(min(count, teacher_NC.shape[-1]), -1)
    return -(top_NK * logits_NC.float().log_softmax(-1).gather(-1, index_NK)).sum(-1)


def feature_distance(output_NH: Tensor, feature_NH: Tensor) -> Tensor:
    """Return the smooth L1 distance of a slot's output and its position's feature, averaged over H:
    [N].
    """
    return functional.smooth_l1_loss(output_NH.float(), feature_NH.float(), reduction="none").mean(
        -1
    )


HASS_LIKELIEST = 10  # tokens of the target whose cross-entropy HASS adds
Acceptance = Literal["none", "total-variation", "shared-noise"]
# The loss of each slot's logits, [N]; `teacher_NC` are probabilities.
TokenLoss = Callable[[Tensor, Tensor], Tensor]
ACCEPTANCES: dict[Acceptance, TokenLoss] = {
    "total-variation": total_variation,
    "shared-noise": shared_noise_refusal,
}


@dataclass(frozen=True)
class Objective:
    steps: int  # unrolled steps, the first included
    decay: float  # weight of each step relative to the one before
    feature_weight: float  # weighs the distance to the next slot's feature; 0: none is computed
    token_loss: TokenLoss


def _tenth(logits_NC: Tensor, teacher_NC: Tensor) -> Tensor:
    return 0.1 * soft_cross_entropy(logits_NC, teacher_NC)


def _tenth_and_likeliest(logits_NC: Tensor, teacher_NC: Tensor) -> Tensor:
    likeliest_N = top_cross_entropy(logits_NC, teacher_NC, HASS_LIKELIEST)
    return _tenth(logits_NC, teacher_NC) + likeliest_N


OBJECTIVES = {
    # EAGLE (arXiv 2401.15077): one step; smooth-L1 1.0 on the next feature, soft cross-entropy
    # 0.1. On an EAGLE-3 network the feature is the next slot's fused g, which takes no gradient.
    "eagle": Objective(1, 1.0, 1.0, _tenth),
    # HASS (arXiv 2408.15766): EAGLE's losses aligned over three unrolled steps, whose slots read
    # the drafter's own features as in drafting, and cross-entropy over the target's likeliest.
    "hass": Objective(3, 1.0, 1.0, _tenth_and_likeliest),
    # EAGLE-3 (arXiv 2503.01840): training-time test over seven steps, soft cross-entropy alone.
    "eagle3": Objective(7, 0.8, 0.0, soft_cross_entropy),
}


def make_objective(
    name: str, acceptance: Acceptance = "none", weight: float = 0.5, steps: int = 0
) -> Objective:
    """Return an objective by name, with an acceptance term added to its token loss. `steps`: number
    of unrolled steps; 0: the objective's own.
    """
    objective = OBJECTIVES[name]
    objective = replace(objective, steps=steps or objective.steps)
    if acceptance == "none":
        return objective
    plain, term = objective.token_loss, ACCEPTANCES[acceptance]

    def with_term(logits_NC: Tensor, teacher_NC: Tensor) -> Tensor:
        term_N = term(logits_NC, teacher_NC)
        return plain(logits_NC, teacher_NC) + weight * term_N

    return replace(objective, token_loss=with_term)
