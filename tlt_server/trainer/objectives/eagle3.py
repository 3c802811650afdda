"""EAGLE-3 (arXiv 2503.01840): training-time test over seven steps, soft cross-entropy alone."""

from __future__ import annotations

from torch import Tensor

from tlt_server.trainer.losses import soft_cross_entropy


class Eagle3Objective:
    steps, decay, feature_weight = 7, 0.8, 0.0

    def token_loss(self, logits_NC: Tensor, teacher_NC: Tensor) -> Tensor:
        return soft_cross_entropy(logits_NC, teacher_NC)
