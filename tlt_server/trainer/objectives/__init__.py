"""Objectives: what a drafter is trained to match, one file and one table line each.

An objective says how far a branch is unrolled, how its steps are weighted, and what a slot costs.
Each may add one acceptance term over the whole draft vocabulary.

Legend: N slots, H hidden, C draft vocabulary.
"""

from __future__ import annotations

from typing import Literal, Protocol

from torch import Tensor

from tlt_server.registry import Registry
from tlt_server.trainer import losses

OBJECTIVES = Registry(
    "objective",
    {
        "eagle": "tlt_server.trainer.objectives.eagle:EagleObjective",
        "hass": "tlt_server.trainer.objectives.hass:HassObjective",
        "eagle3": "tlt_server.trainer.objectives.eagle3:Eagle3Objective",
    },
)
Acceptance = Literal["none", "total-variation", "shared-noise"]
ACCEPTANCES: dict[str, tuple[str, str]] = {
    "none": ("", "no further term"),
    "total-variation": ("total_variation", "1/2 sum |p - q|"),
    "shared-noise": ("shared_noise_refusal", "chance that draft and target differ at T=1"),
}


class Objective(Protocol):
    steps: int  # unrolled steps, the first included
    decay: float  # weight of each step relative to the one before
    feature_weight: float  # weighs the distance to the next slot's feature; 0: none is computed

    def token_loss(self, logits_NC: Tensor, teacher_NC: Tensor) -> Tensor:
        """Loss of each slot's logits, [N]; `teacher_NC` are probabilities."""
        ...


class WithAcceptance:
    """An objective with an acceptance term added to its token loss."""

    def __init__(self, objective: Objective, acceptance: Acceptance, weight: float) -> None:
        self.steps, self.decay = objective.steps, objective.decay
        self.feature_weight = objective.feature_weight
        self._objective, self._weight = objective, weight
        self._term = getattr(losses, ACCEPTANCES[acceptance][0])

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
