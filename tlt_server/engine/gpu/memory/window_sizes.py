"""The sizes of the windows that the ranks of a target exchange through. No tensors."""

from __future__ import annotations

from tlt_kernels.gpu.agreement import SUM_FLOATS
from tlt_kernels.gpu.children import candidate_words
from tlt_kernels.gpu.exchange import WindowSizes, landing_floats, window_bytes
from tlt_kernels.gpu.sampling import block_words, blocks_of_rank
from tlt_server.engine.devices.choice import gpu_split
from tlt_server.engine.gpu.steps.buckets import MAX_DRAFTED, MAX_WIDTH, Shapes, sampled_rows
from tlt_server.engine.settings import DecidedSettings
from tlt_server.models.config import ModelConfig
from tlt_server.models.gpu.sums import room_floats
from tlt_server.models.shards import most_tokens


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
    """Return the memory of a rank's window; a target on one GPU has none. Where NCCL gathers, its
    own buffers take the place of landings, and are not counted.
    """
    alone = settings.tensor_parallel == 1
    return 0 if alone else window_bytes(window_sizes(settings, config, shapes))
