"""Targets with random weights that compute the states of texts, to time what a trainer waits for
when no states were captured.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tlt_server.models import FAMILIES
from tlt_server.models.config import ModelConfig
from tlt_server.models.numerics import Numerics
from tlt_server.trainer.gpu_prefill import GpuPrefill
from tlt_server.trainer.prefill import CpuPrefill, Prefill


def random_target(
    config: ModelConfig, feature_layers: tuple[int, ...], device: torch.device
) -> Prefill:
    """Return a target with random weights, in bfloat16 on a GPU and float32 on a CPU."""
    if device.type == "cuda":
        target = GpuPrefill.empty(config, feature_layers, device)
        randomise(target.model.own_parameters())
        return target
    family = FAMILIES.resolve(config.architecture)
    model = family(config, numerics=Numerics("strict"), feature_layers=feature_layers)
    randomise(model.own_parameters())
    return CpuPrefill(model)


def randomise(weights: Mapping[str, Tensor]) -> None:
    """Fill matrices with values that keep the scale of states; norms are 1, biases 0."""
    for name, weight in weights.items():
        if weight.dim() == 1:
            weight.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            weight.normal_(0.0, weight.shape[1] ** -0.5)
