"""EAGLE (arXiv 2401.15077): one step; smooth-L1 1.0 on the next feature, soft cross-entropy 0.1.

On an EAGLE-3 network the feature is the next slot's fused g, which takes no gradient from it.
"""

from __future__ import annotations

from torch import Tensor

from tlt_server.trainer.losses import soft_cross_entropy


class EagleObjective:
    steps, decay, feature_weight = 1, 1.0, 1.0

    def token_loss(self, logits_NC: Tensor, teacher_NC: Tensor) -> Tensor:
        return 0.1 * soft_cross_entropy(logits_NC, teacher_NC)
