"""HASS (arXiv 2408.15766): EAGLE's losses aligned over three unrolled steps, whose slots read the
drafter's own features as in drafting, and cross-entropy over the target's ten likeliest tokens.
"""

from __future__ import annotations

from torch import Tensor

from tlt_server.trainer.losses import soft_cross_entropy, top_cross_entropy

LIKELIEST = 10


class HassObjective:
    steps, decay, feature_weight = 3, 1.0, 1.0

    def token_loss(self, logits_NC: Tensor, teacher_NC: Tensor) -> Tensor:
        return 0.1 * soft_cross_entropy(logits_NC, teacher_NC) + top_cross_entropy(
            logits_NC, teacher_NC, LIKELIEST
        )
