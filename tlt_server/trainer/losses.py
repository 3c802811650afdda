"""The training targets of a drafter: the target's quantities of each slot, and the losses over
them.

`pair` is the one statement of the alignment, for training and inference alike: slot r holds
(embedding of x_r, feature of position r-1) and predicts x_{r+1}; in EAGLE's words (embed x_{t+1},
h_t) -> h_{t+1}, x_{t+2}. Legend: B sequences, T positions, N slots, H hidden, V target vocabulary,
D draft vocabulary. Every loss is a mean over slots with the given weights; zero weights leave a
slot out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class Pairs(NamedTuple):
    """Aligned tensors of branch roots r = 1 .. N, drafted `step` tokens ahead along the true path;
    N = T-2-step.
    """

    inputs_BN: torch.Tensor
    """x_{r+step}: the token whose embedding enters the slot."""
    features_BNH: torch.Tensor
    """Target feature of position r-1; it enters the slot at step 0, the drafter's output later."""
    next_features_BNH: torch.Tensor
    """Target feature of position r+step: what EAGLE-1/2 regress the slot's output on."""
    teacher_BNV: torch.Tensor
    """Target logits (or probabilities) at position r+step: the distribution of x_{r+step+1}."""
    labels_BN: torch.Tensor
    """x_{r+step+1}."""


def pair(
    tokens_BT: torch.Tensor, features_BTH: torch.Tensor, teacher_BTV: torch.Tensor, step: int = 0
) -> Pairs:
    """Align a batch of sequences with the target's features and outputs over them (all by absolute
    position).
    """
    last = tokens_BT.shape[1] - 1
    if last - 1 - step < 1:
        raise ValueError(
            f"sequences of {last + 1} tokens have no slot {step} steps ahead: they need at least "
            f"{step + 3}"
        )
    return Pairs(
        inputs_BN=tokens_BT[:, 1 + step : last],
        features_BNH=features_BTH[:, : last - 1 - step],
        next_features_BNH=features_BTH[:, 1 + step : last],
        teacher_BNV=teacher_BTV[:, 1 + step : last],
        labels_BN=tokens_BT[:, 2 + step :],
    )


def slot_weights(counted_BT: torch.Tensor, step: int = 0) -> torch.Tensor:
    """Weights [B, N] from `counted_BT` (is token t of the response?): the root's token and the
    predicted token must both count.
    """
    counted = counted_BT.float()
    return counted[:, 1 : counted.shape[1] - 1 - step] * counted[:, 2 + step :]


class DraftTeacher(NamedTuple):
    """The target's distribution on the draft vocabulary."""

    probabilities: torch.Tensor
    """[..., D], renormalised to sum to 1."""
    covered: torch.Tensor
    """[...] float: 1 where the target's most likely token is in the draft vocabulary. EAGLE-3
    trains on these positions only.
    """


def restrict(teacher_logits: torch.Tensor, d2t: torch.Tensor, t2d: torch.Tensor) -> DraftTeacher:
    """Restrict target logits [..., V] to the draft vocabulary. `d2t` [D] holds target id minus
    draft id, `t2d` [V] marks the kept ids.
    """
    kept_ids = d2t + torch.arange(len(d2t), device=d2t.device)
    probabilities = teacher_logits.index_select(-1, kept_ids).float().softmax(-1)
    return DraftTeacher(probabilities, t2d[teacher_logits.argmax(-1)].float())


def soft_cross_entropy(
    draft_logits: torch.Tensor, teacher: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """-sum_v p_v log q_v, averaged by `weights`; logits and teacher [..., D]."""
    return _mean(-(teacher * draft_logits.float().log_softmax(-1)).sum(-1), weights)


def total_variation(
    draft_logits: torch.Tensor, teacher: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """1/2 sum_v |p_v - q_v|: one minus the best chance that a single draft is right."""
    return _mean(0.5 * (teacher - draft_logits.float().softmax(-1)).abs().sum(-1), weights)


def over_steps(losses: Sequence[torch.Tensor], decay: float = 0.8) -> torch.Tensor:
    """Training-time test: step j counts decay^j, normalised to weights that sum to 1."""
    factors = [decay**step for step in range(len(losses))]
    return torch.stack(
        [factor * loss for factor, loss in zip(factors, losses, strict=True)]
    ).sum() / sum(factors)


def _mean(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return (values * weights).sum() / weights.sum().clamp(min=1e-6)
