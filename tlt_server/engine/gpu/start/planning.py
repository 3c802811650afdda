"""The memory of a start on a GPU, from networks without storage: known before anything is loaded.

`CudaDevice` calls this before it reads weights and again before it allocates KV; `tlt doctor` calls
it without a start.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from tlt_kernels.gpu.agreement import SUM_FLOATS
from tlt_kernels.gpu.children import candidate_words
from tlt_kernels.gpu.exchange import WindowSizes, landing_floats, window_bytes
from tlt_kernels.gpu.sampling import block_words, blocks_of_rank
from tlt_server.engine.devices.choice import check_gpu_leaves, gpu_split, wider_settings
from tlt_server.engine.gpu.memory.budget import MemoryPlan, Needs, Wider
from tlt_server.engine.gpu.memory.refusals import check_plan
from tlt_server.engine.gpu.steps.buckets import (
    CAPTURED,
    MAX_DRAFTED,
    MAX_WIDTH,
    MIN_DEPTH,
    PromptShape,
    Shapes,
    sampled_rows,
)
from tlt_server.engine.settings import DecidedSettings
from tlt_server.errors import ModelError, StartupError
from tlt_server.models.config import ModelConfig
from tlt_server.models.gpu.decoder import GpuDecoder, shards
from tlt_server.models.gpu.eagle import spread_drafter
from tlt_server.models.gpu.limits import check_shape
from tlt_server.models.gpu.matmuls import MATMULS
from tlt_server.models.gpu.placement import Placement
from tlt_server.models.gpu.sums import room_floats
from tlt_server.models.shards import first_piece, most_tokens
from tlt_server.models.split import Split
from tlt_server.speculation.drafters import find_loader
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
    """Return a rank's target and drafter, without values."""
    directory = settings.drafter_directory
    if directory is None:
        return shards(config, placement, (), split), None
    loader = find_loader(directory, settings.device)
    target = shards(config, placement, loader.feature_layers(directory, config), split)
    how = settings.drafter_quantization
    return target, spread_drafter(target, lambda of: loader.empty(directory, of, quantization=how))


def window_sizes(settings: DecidedSettings, config: ModelConfig, shapes: Shapes) -> WindowSizes:
    """Return the sizes of each rank's window. config: of the whole target."""
    leaves = settings.reduction_leaves // settings.tensor_parallel
    rows = max(shapes.most_rows(settings.max_rows), MAX_DRAFTED, settings.max_running)
    split = gpu_split(settings, config)
    # At least the logits of a row (`SharedHead.logits`).
    parts = max(room_floats(leaves, rows, config.hidden_size), most_tokens(config, split))
    own = blocks_of_rank(config.vocab_size, settings.tensor_parallel)
    blocks = block_words(sampled_rows(settings.max_running), own)
    if settings.drafter_directory is not None:
        tokens = most_tokens(config, split)  # a drafter has no more
        parts += candidate_words(max(MAX_DRAFTED, settings.max_running), tokens, MAX_WIDTH)
    landing = landing_floats(settings.tensor_parallel, rows, config.hidden_size)
    return WindowSizes(max(parts, blocks) + SUM_FLOATS, landing)


def exchange_bytes(settings: DecidedSettings, config: ModelConfig, shapes: Shapes) -> int:
    """Return the memory of a rank's window; 0 on one GPU. NCCL's own buffers replace the landing
    areas and are not counted.
    """
    alone = settings.tensor_parallel == 1
    return 0 if alone else window_bytes(window_sizes(settings, config, shapes))


def needs_of(
    settings: DecidedSettings, shapes: Shapes, target: GpuDecoder, drafter: DrafterNetwork | None
) -> Needs:
    """Return the needs of a rank with these settings and networks."""
    networks: list[GpuDecoder | DrafterNetwork] = [target, *([drafter] if drafter else [])]
    stored = [each for network in networks for each in network.parameters().values()]
    weights = sum(first_piece(each).nbytes for each in stored)
    part = drafter.part if drafter else None
    exchange = exchange_bytes(settings, target.config, shapes)
    width = target.feature_width
    return Needs.of(settings, target.own_config, drafter, weights, width, part, exchange)


class VersionBytes(NamedTuple):
    """The memory of one version of a rank's target."""

    all: int
    read: int  # by every step: all but an embedding with a head of its own


def version_bytes(settings: DecidedSettings, config: ModelConfig) -> VersionBytes:
    nowhere = placement_on(torch.device("meta"), settings)
    alone = replace(settings, drafter="none")
    target, _ = empty_networks(alone, config, nowhere, gpu_split(settings, config))
    each = {name: first_piece(stored).nbytes for name, stored in target.parameters().items()}
    embedding = 0 if config.tied_embeddings else each["model.embed_tokens.weight"]
    return VersionBytes(sum(each.values()), sum(each.values()) - embedding)


def needs_at(settings: DecidedSettings, config: ModelConfig, shapes: Shapes) -> Needs:
    """Return the needs of a rank with these settings, which may name another width."""
    nowhere = placement_on(torch.device("meta"), settings)
    split = gpu_split(settings, config)
    return needs_of(settings, shapes, *empty_networks(settings, config, nowhere, split))


def needs_wider(settings: DecidedSettings, config: ModelConfig, shapes: Shapes) -> list[Wider]:
    """Return the needs at every larger width, then those in FP8 where that is possible."""
    found = [
        Wider(wide, needs_at(wide, config, shapes)) for wide in wider_settings(settings, config)
    ]
    halved = in_fp8(settings, config)
    if halved is not None:
        quantised = replace(settings, quantization="fp8")
        found.append(Wider(quantised, needs_at(quantised, halved, shapes)))
    return found


def in_fp8(settings: DecidedSettings, config: ModelConfig) -> ModelConfig | None:
    """Return the config in FP8; None if it is already, or cannot be."""
    if settings.quantization == "fp8" or settings.dtype != "bfloat16":
        return None
    halved = config.stored_as("fp8", str(settings.model))
    try:
        check_shape(halved, halved.layer_shape, str(settings.model))
        check_gpu_leaves(settings, halved)
    except (ModelError, StartupError):
        return None
    return halved


def plan_start(
    settings: DecidedSettings, config: ModelConfig, shapes: Shapes, free: int, total: int
) -> MemoryPlan:
    """Return the plan of a start with this memory. Raises `StartupError` if it does not fit.
    `config`: of the whole target.
    """
    needs = needs_at(settings, config, shapes)
    plan = MemoryPlan(settings, needs, config.max_position, free - needs.loaded, total)
    check_plan(plan, partial(needs_wider, settings, config, shapes))
    return plan
