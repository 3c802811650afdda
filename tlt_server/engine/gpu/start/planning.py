"""The memory of a start on a GPU, from networks without storage: known before anything is loaded.

`CudaDevice` asks before it reads weights and again before it allocates KV, `tlt doctor` instead of
a start.
"""

from __future__ import annotations

from functools import partial

import torch

from tlt_server.engine.devices.choice import gpu_split, wider_settings
from tlt_server.engine.gpu.memory.budget import MemoryPlan, Needs, Wider
from tlt_server.engine.gpu.memory.refusals import check_plan
from tlt_server.engine.gpu.memory.window_sizes import exchange_bytes
from tlt_server.engine.gpu.steps.buckets import CAPTURED, MIN_DEPTH, PromptShape, Shapes
from tlt_server.engine.settings import DecidedSettings
from tlt_server.models.config import ModelConfig
from tlt_server.models.gpu.decoder import GpuDecoder, shards
from tlt_server.models.gpu.eagle import spread_drafter
from tlt_server.models.gpu.matmuls import MATMULS
from tlt_server.models.gpu.placement import Placement
from tlt_server.models.shards import tensors_of
from tlt_server.models.split import Split
from tlt_server.speculation.drafters.loading import find_loader
from tlt_server.weights.parts import DrafterNetwork


def shapes_of(settings: DecidedSettings, prompts: PromptShape = CAPTURED) -> Shapes:
    depth, adapters = max(MIN_DEPTH, settings.deepest), settings.max_loras > 0
    return Shapes(settings.max_running, depth, prompts, adapters)


def placement_on(device: torch.device, settings: DecidedSettings) -> Placement:
    matmuls = MATMULS[settings.numerics]()
    dtype, how = getattr(torch, settings.dtype), settings.drafter_parallel
    return Placement(device, dtype, matmuls, drafter_parallel=how)


def empty_networks(
    settings: DecidedSettings, config: ModelConfig, placement: Placement, split: Split
) -> tuple[GpuDecoder, DrafterNetwork | None]:
    """Return a rank's target and drafter, not filled."""
    directory = settings.drafter_directory
    if directory is None:
        return shards(config, placement, (), split), None
    loader = find_loader(directory, settings.device)
    target = shards(config, placement, loader.feature_layers(directory, config), split)
    return target, spread_drafter(target, lambda of: loader.empty(directory, of))


def needs_of(
    settings: DecidedSettings, shapes: Shapes, target: GpuDecoder, drafter: DrafterNetwork | None
) -> Needs:
    """Return what a rank needs with these settings for these networks."""
    networks: list[GpuDecoder | DrafterNetwork] = [target, *([drafter] if drafter else [])]
    stored = [each for network in networks for each in network.parameters().values()]
    values = sum(tensors_of(each)[0].numel() for each in stored)
    part = drafter.part if drafter else None
    exchange = exchange_bytes(settings, target.config, shapes)
    width = target.feature_width
    return Needs.of(settings, target.own_config, drafter, values, width, part, exchange)


def needs_at(settings: DecidedSettings, config: ModelConfig, shapes: Shapes) -> Needs:
    """Return what a rank would need with these settings, whose width may be another."""
    nowhere = placement_on(torch.device("meta"), settings)
    split = gpu_split(settings, config)
    return needs_of(settings, shapes, *empty_networks(settings, config, nowhere, split))


def needs_wider(settings: DecidedSettings, config: ModelConfig, shapes: Shapes) -> list[Wider]:
    return [
        Wider(wide, needs_at(wide, config, shapes)) for wide in wider_settings(settings, config)
    ]


def plan_start(
    settings: DecidedSettings, config: ModelConfig, shapes: Shapes, free: int, total: int
) -> MemoryPlan:
    """Return the plan of a start with so much memory; `StartupError` where it does not fit.
    `config`: of the whole target, whose positions are those that are served.
    """
    needs = needs_at(settings, config, shapes)
    plan = MemoryPlan(settings, needs, config.max_position, free - needs.loaded, total)
    check_plan(plan, partial(needs_wider, settings, config, shapes))
    return plan
