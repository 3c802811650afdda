"""Each rank's part of a drafter on several GPUs: of the layer, heads and a part of the MLP; of the
head, draft tokens. `fc` and norms are whole on every rank. Alternatively every rank has the whole
drafter.

A drafter has the target's reduction segments, or fewer if these would cut a head, so drafts are
equal at every width with one fingerprint. No tensors: the engine and `tlt doctor` ask before a
drafter is made.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import NamedTuple

from tlt_client.quantise import BLOCK
from tlt_kernels.gpu.gemm_tiles import LEAF_COUNTS, LEAF_UNIT, LEAVES
from tlt_server.errors import StartupError
from tlt_server.models.config import ModelConfig
from tlt_server.models.draft_networks import ARCHITECTURES
from tlt_server.models.shards import (
    DIMS,
    has_tokens,
    most_tokens,
    rank_config,
    vocabulary,
    whole_blocks,
)
from tlt_server.models.split import Split, divides
from tlt_server.settings.server import DrafterParallel

# Sharing adds three exchanges to each level of a tree, 5 us each, in which an H200 reads as much:
# ranks share a drafter that lets each of them read this much less.
WORTHWHILE = 64 * 2**20


class DrafterPart(NamedTuple):
    """A rank's part of a drafter."""

    split: Split
    head_split: Split  # the target's where it drafts with the target's head
    layer: ModelConfig  # with the heads and the part of the MLP of this rank
    head: ModelConfig  # the whole drafter's, whose vocabulary is that of drafts

    @property
    def tokens(self) -> slice:
        """Return the draft tokens whose logits this rank computes."""
        return slice(*vocabulary(self.head, self.head_split))

    @property
    def most_tokens(self) -> int:
        """Return the largest number of draft tokens of any rank."""
        return min(most_tokens(self.head, self.head_split), self.head.vocab_size)


def drafter_part(
    config: ModelConfig, draft_vocab: int, target: Split, asked: DrafterParallel, itemsize: int
) -> DrafterPart:
    """Return the drafter's part for the rank with this part of the target. itemsize: bytes of a
    weight that is not in FP8. `StartupError` if `asked` is shared and the ranks cannot share the
    drafter.
    """
    counts = [
        count
        for count in LEAF_COUNTS
        if LEAVES <= count <= target.leaves and divides(config, count, LEAF_UNIT)
    ]
    leaves, head = max(counts, default=LEAVES), replace(config, vocab_size=draft_vocab)
    split = Split(leaves, target.rank, target.of)
    if config.quantization is not None:
        split, itemsize = replace(split, token_block=BLOCK), 1
    fits = target.of <= max(counts, default=0) and _divides(head, split)
    if target.of > 1 and asked == "shared" and not fits:
        raise StartupError(
            f"drafter_parallel is shared and tensor_parallel {target.of}, and the drafter has "
            f"{config.heads} heads of {config.head_dim}, {config.kv_heads} KV heads, an MLP of "
            f"{config.intermediate_size} and {draft_vocab} draft tokens, which these ranks "
            "cannot share, or no head of its own; use auto or replicated"
        )
    pays = asked == "shared" or _saved(head, target.of) * itemsize >= WORTHWHILE
    if asked == "replicated" or not fits or not pays:
        split = Split(leaves)
    head_split = split
    if not ARCHITECTURES[config.architecture].own_head and "lm_head" not in target.whole:
        head_split = target
    return DrafterPart(split, head_split, rank_config(config, split), head)


def _divides(head: ModelConfig, split: Split) -> bool:
    """Return True if each rank can have a KV head and a block of draft tokens."""
    kv_fits = head.kv_heads % split.of == 0 or split.of % head.kv_heads == 0
    own_head = ARCHITECTURES[head.architecture].own_head
    fits = kv_fits and whole_blocks(head, split.of) and has_tokens(head, split)
    return own_head and fits


def _saved(head: ModelConfig, ranks: int) -> int:
    """Return the number of weights per level that a rank need not read, as other ranks do."""
    matrices = ARCHITECTURES[head.architecture].matrices(head, head.vocab_size)
    cut = sum(prod(shape) for name, shape in matrices.items() if name.split(".")[-1] in DIMS)
    return cut * (ranks - 1) // ranks
