"""The active weights as a trainer reads them: a directory that the engine writes. Of the target it
has only the embedding and the head's rows of the draft vocabulary; on a GPU the trainer and the
replayed drafters share them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec
import torch
import xxhash
from safetensors.torch import load_file
from torch import Tensor

from tlt_client.channels.checksums import digest
from tlt_server.models.config import ModelConfig
from tlt_server.models.decoder import Decoder
from tlt_server.models.draft_checkpoint import Served, feature_layers
from tlt_server.models.gpu.matmuls import StrictMatmuls
from tlt_server.models.gpu.placement import Placement
from tlt_server.models.loader import empty_target
from tlt_server.models.numerics import Numerics
from tlt_server.models.split import Split
from tlt_server.settings.server import QuantizationName
from tlt_server.speculation.cost import CostModel, CostRecord
from tlt_server.trainer.learning.network import TargetShape, TrainableDrafter, load_trainable
from tlt_server.trainer.replaying.replay import PAGE_SIZE, ReplayedDrafter
from tlt_server.weights.checksums import live_sums
from tlt_server.weights.handover import COSTS, DRAFTER, EMBEDDING, HEAD, TARGET
from tlt_server.wire.records import drafter_key


class Frame(Served, Protocol):
    """The target without its layers."""

    @property
    def feature_width(self) -> int: ...


class HandedHead(NamedTuple):
    weight_WH: Tensor  # rows of the draft vocabulary: all of them where a drafter has no head


@dataclass
class GpuFrame(TargetShape):
    """The parts of a `models.gpu.decoder.GpuDecoder` that its drafter reads."""

    placement: Placement
    embedding_VH: Tensor
    head: HandedHead
    split: Split

    @property
    def feature_width(self) -> int:
        return len(self.feature_layers) * self.hidden_size


class Handed(NamedTuple):
    """One target version with the active drafter."""

    target_version: str
    drafter_version: str
    embedding_VH: Tensor
    head_CH: Tensor
    frame: Frame
    directory: Path  # where the drafter is
    in_force: ReplayedDrafter
    cost: CostModel | None = None  # the engine's; None: it has not measured its steps

    def identity(self) -> dict[str, str]:
        """Return the identity of the active drafter: the version alone, such as `initial`, may name
        several.
        """
        return {"drafter": self.drafter_version, "digest": digest_of(self.in_force)}

    def trainable(self, device: torch.device, compute: torch.dtype) -> TrainableDrafter:
        config = self.frame.config
        return load_trainable(self.directory, config, compute=compute, device=device)

    @property
    def quantization(self) -> QuantizationName:
        """Return the form in which the engine drafts."""
        found: QuantizationName = self.in_force.weights.network.quantization
        return found

    @property
    def drafter_key(self) -> str:
        return drafter_key(self.drafter_version, self.quantization)

    def replayed(
        self, directory: Path, quantization: QuantizationName | None = None
    ) -> ReplayedDrafter:
        """Load another drafter, or the active one, by default in the form of the active one."""
        device, how = self.in_force.device, quantization or self.quantization
        return ReplayedDrafter.load(directory, self.frame, device=device, quantization=how)


def digest_of(drafter: ReplayedDrafter) -> str:
    """Return a checksum of weights and draft vocabulary; of FP8, of what it was made from."""
    sums = live_sums(drafter.weights.network.parameters())
    sums["d2t"] = xxhash.xxh3_64_hexdigest(drafter.vocabulary().tobytes())
    return digest(sums)


def read_handed(
    directory: Path,
    model: Path,
    target_version: str,
    drafter_version: str,
    device: str,
    leaves: int,
    quantization: QuantizationName = "none",
) -> Handed:
    """Read the handed-over weights, for a replay on a device of `FRAMES`. `model`: the served
    directory. `leaves`: its number of reduction segments. `quantization`: in which it drafts.
    `ModelError` if the drafter does not fit.
    """
    own = directory / DRAFTER
    tensors = load_file(directory / TARGET, device=device)
    frame = FRAMES[device](model, own, tensors[EMBEDDING], tensors[HEAD], leaves)
    in_force = ReplayedDrafter.load(own, frame, drafter_version, device, quantization)
    return Handed(
        target_version,
        drafter_version,
        tensors[EMBEDDING],
        tensors[HEAD],
        frame,
        own,
        in_force,
        _cost(directory / COSTS, in_force.kind),
    )


def _cost(file: Path, drafter: str) -> CostModel | None:
    """Return the times of steps; None if they are unknown for this drafter."""
    cost = CostModel()
    try:
        record = msgspec.json.decode(file.read_bytes(), type=CostRecord)
        cost.restore(record)
    except (OSError, ValueError):
        return None
    return cost if drafter in record.draft else None


def cpu_frame(
    model: Path, drafter: Path, embedding_VH: Tensor, head_CH: Tensor, leaves: int
) -> Decoder:
    config = ModelConfig.read(model)
    with torch.device("meta"):
        frame = empty_target(
            model,
            config=config,
            numerics=Numerics("strict"),
            page_size=PAGE_SIZE,
            feature_layers=feature_layers(drafter, config),
        )
    frame.embedding_VH = embedding_VH.float()
    frame.head_HV = head_CH.float().t().contiguous()
    return frame


def gpu_frame(
    model: Path, drafter: Path, embedding_VH: Tensor, head_CH: Tensor, leaves: int
) -> Frame:
    config = ModelConfig.read(model)
    placement = Placement(embedding_VH.device, embedding_VH.dtype, StrictMatmuls())
    layers = feature_layers(drafter, config)
    head = HandedHead(head_CH)
    return GpuFrame(config, layers, placement, embedding_VH, head, Split(leaves))


FRAMES: dict[str, Callable[[Path, Path, Tensor, Tensor, int], Frame]] = {
    "cpu": cpu_frame,
    "cuda": gpu_frame,
}
