"""Weights in force as a trainer has them: a directory that the engine writes, and what is made of
it. The target is there with its embedding and the head's rows of the draft vocabulary only.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
import xxhash
from safetensors.torch import load_file
from torch import Tensor

from tlt_server.models.config import ModelConfig
from tlt_server.models.decoder import Decoder
from tlt_server.models.draft_checkpoint import feature_layers
from tlt_server.models.loader import empty_target
from tlt_server.models.numerics import Numerics
from tlt_server.trainer.network import TrainableDrafter, load_trainable
from tlt_server.trainer.replay import ReplayedDrafter
from tlt_server.weights.checksums import digest, live_sums
from tlt_server.weights.handover import DRAFTER, EMBEDDING, HEAD, TARGET

PAGE_SIZE = 16


class Handed(NamedTuple):
    """One target version with the drafter in force."""

    target_version: str
    drafter_version: str
    embedding_VH: Tensor
    head_CH: Tensor
    frame: Decoder  # the target without its layers
    directory: Path  # where the drafter is
    in_force: ReplayedDrafter

    def identity(self) -> dict[str, str]:
        """Name the drafter in force: another one may have its version, such as `initial`."""
        network = self.in_force.weights.network
        sums = live_sums(network.parameters())
        sums["d2t"] = xxhash.xxh3_64_hexdigest(self.in_force.vocabulary().tobytes())
        return {"drafter": self.drafter_version, "digest": digest(sums)}

    def trainable(self, device: torch.device, compute: torch.dtype) -> TrainableDrafter:
        config = self.frame.config
        return load_trainable(self.directory, config, compute=compute, device=device)

    def replayed(self, directory: Path) -> ReplayedDrafter:
        return ReplayedDrafter.load(directory, self.frame)


def read_handed(directory: Path, model: Path, target_version: str, drafter_version: str) -> Handed:
    """Read what the engine has handed over. `model`: the directory that is served. `ModelError`
    where the drafter does not fit.
    """
    own = directory / DRAFTER
    tensors = load_file(directory / TARGET)
    config = ModelConfig.read(model)
    with torch.device("meta"):
        frame = empty_target(
            model,
            config=config,
            numerics=Numerics("strict"),
            page_size=PAGE_SIZE,
            feature_layers=feature_layers(own, config),
        )
    frame.embedding_VH = tensors[EMBEDDING].float()
    frame.head_HV = tensors[HEAD].float().t().contiguous()
    return Handed(
        target_version,
        drafter_version,
        tensors[EMBEDDING],
        tensors[HEAD],
        frame,
        own,
        ReplayedDrafter.load(own, frame, drafter_version),
    )
