"""Objectives: what a drafter is trained to match, one table line each.

An objective says how far a branch is unrolled, how its steps are weighted, and what a slot costs.
It may add one acceptance term over the whole draft vocabulary.

Legend: N slots, C draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from tlt_server.trainer.learning.losses import (
    shared_noise_refusal,
    soft_cross_entropy,
    top_cross_entropy,
    total_variation,
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
