"""Checks the checkpoints by the loader's rules on torch's meta device: no weight is read. A start
does this before it takes requests, and `tlt doctor` without a start.
"""

from __future__ import annotations

from pathlib import Path

import torch

from tlt_server.engine.devices.sizing import kv_pages
from tlt_server.engine.settings import DecidedSettings, EngineSettings
from tlt_server.errors import StartupError
from tlt_server.models.config import ModelConfig
from tlt_server.models.decoder import Decoder
from tlt_server.models.gpu.limits import check_shape
from tlt_server.models.loader import check_files, empty_target, unread
from tlt_server.models.numerics import Numerics
from tlt_server.models.split import WHOLE, Split
from tlt_server.settings.server import QuantizationName
from tlt_server.speculation.drafters import find_loader
from tlt_server.weights.parts import DrafterNetwork


def check_checkpoints(settings: DecidedSettings) -> None:
    """Raise the error that a load would raise for a target, a drafter or the memory for KV."""
    target = empty_model(settings)
    check_target(settings, target, on_gpu=settings.device != "cpu")
    if directory := settings.drafter_directory:
        network = empty_drafter(directory, target, settings.drafter_quantization)
        check_drafter(settings, network, settings.device)
    if settings.device == "cpu":
        kv_bytes(settings)


def empty_model(settings: EngineSettings, split: Split = WHOLE) -> Decoder:
    """Return the target without storage, or a rank's part of it."""
    config, directory = ModelConfig.served(settings), settings.drafter_directory
    layers = find_loader(directory, "cpu").feature_layers(directory, config) if directory else ()
    with torch.device("meta"):
        return empty_target(
            settings.model,
            config=config,
            numerics=Numerics("strict"),
            page_size=settings.page_size,
            feature_layers=layers,
            split=split,
        )


def empty_drafter(
    directory: Path, target: Decoder, quantization: QuantizationName = "none"
) -> DrafterNetwork:
    """Return the drafter without storage."""
    loader = find_loader(directory, "cpu")
    with torch.device("meta"):
        network: DrafterNetwork = loader.empty(directory, target, quantization=quantization)
        return network


def check_target(settings: EngineSettings, target: Decoder, *, on_gpu: bool) -> None:
    directory = Path(settings.model)
    if on_gpu:
        check_shape(target.config, target.config.layer_shape, str(directory))
    if not settings.random_weights:
        check_files(target.parameters(), directory, ignored=unread(target.config))


def check_drafter(settings: EngineSettings, network: DrafterNetwork, device: str) -> None:
    directory = settings.drafter_directory
    assert directory is not None, "a drafter without files"
    loader = find_loader(directory, device)
    loader.check(network, directory)
    loader.calibration(directory)
    if device == "cpu" and settings.tensor_parallel > 1:
        _check_own_head(network, directory)


def kv_bytes(settings: DecidedSettings) -> int:
    """Return the bytes of KV on a CPU's rank."""
    of_rank = empty_model(settings, Split(settings.reduction_leaves, 0, settings.tensor_parallel))
    per_page = of_rank.make_cache(1, settings.page_size, 0).bytes_per_kv_slot * settings.page_size
    return per_page * kv_pages(settings, per_page, of_rank.max_position)


def _check_own_head(network: DrafterNetwork, directory: Path) -> None:
    """Raise `StartupError` for a drafter on several ranks that reads the target's head."""
    if not network.own_head:
        raise StartupError(
            f"the drafter {directory} reads the target's head, which several ranks share; use an "
            "EAGLE-3 drafter, or tensor_parallel 1"
        )
