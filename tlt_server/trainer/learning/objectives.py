"""Objectives: what a drafter is trained to match, one class and one table line each.

An objective says how far a branch is unrolled, how its steps are weighted, and what a slot costs.
Each may add one acceptance term over the whole draft vocabulary.

Legend: N slots, H hidden, C draft vocabulary.
"""

from __future__ import annotations

from typing import Literal, Protocol

from torch import Tensor

from tlt_server.registry import Registry
from tlt_server.trainer.learning.losses import (
    shared_noise_refusal,
    soft_cross_entropy,
    top_cross_entropy,
    total_variation,
)

OBJECTIVES = Registry(
    "objective",
    {
        "eagle": "tlt_server.trainer.learning.objectives:EagleObjective",
        "hass": "tlt_server.trainer.learning.objectives:HassObjective",
        "eagle3": "tlt_server.trainer.learning.objectives:Eagle3Objective",
    },
)
HASS_LIKELIEST = 10  # tokens of the target whose cross-entropy HASS adds
Acceptance = Literal["none", "total-variation", "shared-noise"]
ACCEPTANCES = {"total-variation": total_variation, "shared-noise": shared_noise_refusal}


class Objective(Protocol):
    steps: int  # unrolled steps, the first included
    decay: float  # weight of each step relative to the one before
    feature_weight: float  # weighs the distance to the next slot's feature; 0: none is computed

    def token_loss(self, logits_NC: Tensor, teacher_NC: Tensor) -> Tensor:
        """Loss of each slot's logits, [N]; `teacher_NC` are probabilities."""
        ...


class EagleObjective:
    """EAGLE (arXiv 2401.15077): one step; smooth-L1 1.0 on the next feature, soft cross-entropy
    0.1. On an EAGLE-3 network the feature is the next slot's fused g, which takes no gradient.
    """

    steps, decay, feature_weight = 1, 1.0, 1.0

    def token_loss(self, logits_NC: Tensor, teacher_NC: Tensor) -> Tensor:
        return 0.1 * soft_cross_entropy(logits_NC, teacher_NC)


class HassObjective:
    """HASS (arXiv 2408.15766): EAGLE's losses aligned over three unrolled steps, whose slots read
    the drafter's own features as in drafting, and cross-entropy over the target's ten likeliest
    tokens.
    """

    steps, decay, feature_weight = 3, 1.0, 1.0

    def token_loss(self, logits_NC: Tensor, teacher_NC: Tensor) -> Tensor:
        return 0.1 * soft_cross_entropy(logits_NC, teacher_NC) + top_cross_entropy(
            logits_NC, teacher_NC, HASS_LIKELIEST
        )


class Eagle3Objective:
    """EAGLE-3 (arXiv 2503.01840): training-time test over seven steps, soft cross-entropy alone."""

    steps, decay, feature_weight = 7, 0.8, 0.0

    def token_loss(self, logits_NC: Tensor, teacher_NC: Tensor) -> Tensor:
        return soft_cross_entropy(logits_NC, teacher_NC)


class WithAcceptance:
    """An objective with an acceptance term added to its token loss."""

    def __init__(self, objective: Objective, acceptance: Acceptance, weight: float) -> None:
        self.steps, self.decay = objective.steps, objective.decay
        self.feature_weight = objective.feature_weight
        self._objective, self._weight = objective, weight
        self._term = ACCEPTANCES[acceptance]

    def token_loss(self, logits_NC: Tensor, teacher_NC: Tensor) -> Tensor:
        term_N: Tensor = self._term(logits_NC, teacher_NC)
        return self._objective.token_loss(logits_NC, teacher_NC) + self._weight * term_N


def make_objective(
    name: str, acceptance: Acceptance = "none", weight: float = 0.5, steps: int = 0
) -> Objective:
    """Return an objective by name, unrolled over `steps` steps where that is not 0. `StartupError`
    for a name that is not known.
    """
    objective: Objective = OBJECTIVES.resolve(name)()
    objective.steps = steps or objective.steps
    return objective if acceptance == "none" else WithAcceptance(objective, acceptance, weight)
