"""Static shapes of a step: the bucket of its batch, its decode rows, and the keys that policies can reach. No tensors."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from tlt_kernels.gpu.growth import columns
from tlt_kernels.gpu.rows import MAX_NODES
from tlt_server.attention import gpu as attention
from tlt_server.engine.gpu.drafts import DraftKey
from tlt_server.engine.gpu.extend import ExtendKey
from tlt_server.records import OFF, Strategy

BATCHES = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512)
PROMPT_ROWS, PROMPT_WORKS = 512, 16  # of a captured step that reads prompts, too
MOST_VERIFIED = attention.TREE_ROWS  # decode rows of a step, at most; a larger batch has its roots
MOST_WIDTH = 8  # children of a node
MOST_DRAFTED = attention.TREE_ROWS  # rows of one level of a drafter's pass; a larger batch has one each
TREE_ROWS = 8192  # rows of a drafter's pass, without the roots
LEAST_DEPTH = 12  # draft paths of so many tokens are possible, whatever the default strategies are


class PromptShape(NamedTuple):
    """What the prompt rows of a step are padded to."""

    rows: int = PROMPT_ROWS
    works: int = PROMPT_WORKS
    grain: int = 256  # rows of larger steps are a multiple of it


CAPTURED = PromptShape()


def batch_buckets(max_running: int) -> tuple[int, ...]:
    """Sizes that batches are padded to, the last of which holds every batch."""
    above = bisect_left(BATCHES, max_running)
    return (*BATCHES[:above], max_running)


def bucket(sizes: Sequence[int], count: int) -> int:
    """The smallest size that holds `count`, itself if none does."""
    at = bisect_left(sizes, count)
    return sizes[at] if at < len(sizes) else count


def fitted(strategy: Strategy, batch: int, depth: int) -> Strategy:
    """The strategy cut to what the device holds: paths of `depth`, TREE_ROWS and per level MOST_DRAFTED draft rows, MOST_WIDTH children;
    OFF where no draft could be verified."""
    if decode_rows(batch, strategy) == batch:
        return OFF
    depth = min(strategy.depth, depth, 1 + TREE_ROWS // batch)
    width = min(strategy.width, MOST_WIDTH, max(1, MOST_DRAFTED // batch), max(1, TREE_ROWS // (batch * max(1, depth - 1))))
    while width > 1 and batch * columns(depth, width) > MAX_NODES:
        width -= 1
    return msgspec.structs.replace(strategy, depth=depth, width=width)


def decode_rows(batch: int, strategy: Strategy) -> int:
    """Rows of a bucket's decode requests, drafts included."""
    return max(batch, min(batch * strategy.rows, MOST_VERIFIED))


def prompt_sizes(rows: int, works: int, most_works: int, shape: PromptShape = CAPTURED) -> tuple[int, int]:
    """(prompt rows, prompt works) of a step that reads so many; what a captured step holds, else rounded up coarsely."""
    if not works:
        return 0, 0
    if rows <= shape.rows and works <= shape.works:
        return shape.rows, shape.works
    return -(-rows // shape.grain) * shape.grain, shape.works if works <= shape.works else most_works


def keeps(key: ExtendKey) -> bool:
    """Worth a graph: steps that read long prompts come in too many sizes, and take the device longer than the host to launch."""
    return key.prompt_rows <= PROMPT_ROWS


def rehearsed(max_rows: int, max_running: int) -> list[ExtendKey]:
    """Steps of the largest prompts, and one with filters, run once at start so that no request waits for a compiler."""
    large = [ExtendKey(1, 1, *prompt_sizes(rows, works, max(max_running, PROMPT_WORKS)))
             for rows, works in ((max_rows, 1), (max_rows, PROMPT_WORKS + 1)) if rows > PROMPT_ROWS]
    return [*large, ExtendKey(1, 1, filtered=True)]


def draft_key(batch: int, strategy: Strategy) -> DraftKey:
    return DraftKey(strategy.drafter, batch, strategy.depth, strategy.width)


def reachable(arms: Iterable[Strategy], affordable_rows: Sequence[tuple[int, int]], max_running: int) -> list[DraftKey | ExtendKey]:
    """Keys of pure decode steps under these arms, the largest first, and of plain decoding beside prompt rows.

    affordable_rows: (smallest batch, most verify rows per request), as policies use it.
    """
    keys: dict[DraftKey | ExtendKey, None] = {}
    below = 0
    for batch in batch_buckets(max_running):
        smallest = below + 1  # a batch of so many is the first that this bucket serves
        below = batch
        most = max((rows for start, rows in affordable_rows if start <= batch and not _ends(affordable_rows, start) < smallest), default=1)
        for arm in arms:
            if arm == OFF:
                keys[ExtendKey(batch, batch)] = None
                keys[ExtendKey(batch, batch, PROMPT_ROWS, PROMPT_WORKS)] = None
            elif arm.rows <= most and fitted(arm, batch, arm.depth) != OFF:
                keys[ExtendKey(batch, decode_rows(batch, arm))] = None
                keys[draft_key(batch, arm)] = None
    return sorted(keys, key=_size, reverse=True)


def _ends(affordable_rows: Sequence[tuple[int, int]], start: int) -> float:
    """The largest batch of the range that begins with `start`."""
    return min((other - 1 for other, _ in affordable_rows if other > start), default=float("inf"))


def _size(key: DraftKey | ExtendKey) -> int:
    return key.decode_rows + key.prompt_rows if isinstance(key, ExtendKey) else key.batch * key.width
