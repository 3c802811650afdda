"""Static shapes of a step: the bucket of its batch, its decode rows, its prompt rows, and the keys
that policies can reach. No tensors.

A matmul computes whole tiles of rows, so a step of 4097 rows costs as much as one of 4352. A step
with prompt rows is therefore padded to one of a few small sizes, all of which are captured, or to a
multiple of a grain. The scheduler fills the padding with prompt rows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from tlt_kernels.gpu.branches import columns
from tlt_kernels.gpu.rows import MAX_NODES
from tlt_server.attention import gpu as attention
from tlt_server.engine.gpu.steps.drafts import DraftKey
from tlt_server.engine.gpu.steps.extend import ExtendKey
from tlt_server.speculation.sizes import Reach
from tlt_server.wire.records import OFF, StepContext, Strategy

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 384, 512)  # a step of 96 rows costs more than 128
# Padding of a batch with prompts takes the place of prompt rows.
WITH_PROMPTS = (0, 2, 8, 16, 32, *BATCHES[6:])
# A captured step that reads prompts: its rows in all, and its prompts.
PROMPT_SIZES, PROMPT_CHUNKS = (64, 128, 256, 384, 512), 16
MAX_VERIFIED = attention.TREE_ROWS  # decode rows of a step, at most; a larger batch has its roots
# Decode rows that policies choose from, up to DENSEST per request. Next to prompts they leave 64
# rows of a size of PROMPT_SIZES.
DECODE_ROWS, DENSEST = (1, 2, 4, 8, 16, 32, 64, 128, 256, 384, MAX_VERIFIED), 32
ROWS_WITH_PROMPTS, DENSEST_WITH_PROMPTS = (16, 64, 192, 320, 448), 16
MAX_WIDTH = 8  # children of a node
# Rows of one level of a drafter's pass; a larger batch has one each.
MAX_DRAFTED = attention.TREE_ROWS
TREE_ROWS = 8192  # rows of a drafter's pass, without the roots
MIN_DEPTH = (
    12  # tokens of a draft path that is always possible, also with shorter default strategies
)


class PromptShape(NamedTuple):
    """The padded sizes of steps with prompt rows: multiples of the tile height for that number of
    rows.
    """

    # Rows of captured steps, decode rows included; more where those leave less than a grain.
    sizes: tuple[int, ...] = PROMPT_SIZES
    chunks: int = PROMPT_CHUNKS
    grain: int = 256  # rows that a larger step is a multiple of

    def padded(self, rows: int) -> int:
        return next(
            (size for size in self.sizes if rows <= size), -(-rows // self.grain) * self.grain
        )

    def largest(self, decode_rows: int) -> int:
        """Return the rows of the largest captured step with this number of decode rows."""
        return max(self.sizes[-1], self.padded(decode_rows + self.grain))

    def captured(self, decode_rows: int) -> list[int]:
        """Return the rows of every captured step with this number of decode rows."""
        return sorted(
            {self.padded(rows) for rows in range(decode_rows + 1, self.largest(decode_rows) + 1)}
        )


CAPTURED = PromptShape()


class StepShape(NamedTuple):
    """The strategy and the passes of a step."""

    strategy: Strategy  # cut to what the device holds
    draft: DraftKey | None
    extend: ExtendKey


def batch_buckets(max_running: int, sizes: Sequence[int] = BATCHES) -> tuple[int, ...]:
    """Return the sizes that batches are padded to; the last one holds every batch."""
    return (*sizes[: bisect_left(sizes, max_running)], max_running)


def bucket(sizes: Sequence[int], count: int) -> int:
    """Return the smallest size that holds `count`, or `count` if none does."""
    at = bisect_left(sizes, count)
    return sizes[at] if at < len(sizes) else count


def fitted(strategy: Strategy, batch: int, depth: int) -> Strategy:
    """Return the strategy within the device's limits: paths of `depth`, TREE_ROWS rows, MAX_DRAFTED
    draft rows per level, MAX_WIDTH children. OFF if no draft could be verified, unless the strategy
    has one row: it drafts for a recording.
    """
    if strategy.rows > 1 and decode_rows(batch, strategy) == batch:
        return OFF
    depth = min(strategy.depth, depth, 1 + TREE_ROWS // batch)
    width = min(
        strategy.width,
        MAX_WIDTH,
        max(1, MAX_DRAFTED // batch),
        max(1, TREE_ROWS // (batch * max(1, depth - 1))),
    )
    while width > 1 and batch * columns(depth, width) > MAX_NODES:
        width -= 1
    return msgspec.structs.replace(strategy, depth=depth, width=width)


def decode_rows(batch: int, strategy: Strategy) -> int:
    """Return the rows of a bucket's decode requests, drafts included."""
    return max(batch, min(batch + strategy.draft_rows(batch), MAX_VERIFIED))


def sampled_rows(max_running: int) -> int:
    """Return the most rows of a step that need logits: decode rows, and one per prefill chunk."""
    return max(MAX_VERIFIED, max_running) + max(PROMPT_CHUNKS, max_running)


def draft_key(batch: int, strategy: Strategy) -> DraftKey:
    return DraftKey(strategy.drafter, batch, strategy.depth, strategy.width)


@dataclass(frozen=True)
class Shapes:
    """The shapes of one engine's steps, with up to `max_running` sequences and draft paths of up to
    `depth`.
    """

    max_running: int
    depth: int
    prompts: PromptShape = CAPTURED
    adapters: bool = False  # requests may have LoRA adapters

    @cached_property
    def batches(self) -> tuple[int, ...]:
        return batch_buckets(self.max_running)

    @cached_property
    def with_prompts(self) -> tuple[int, ...]:
        return batch_buckets(self.max_running, WITH_PROMPTS)

    @property
    def max_chunks(self) -> int:
        return max(self.max_running, self.prompts.chunks)

    def batch(self, requests: int, *, prompts: bool) -> int:
        """Return the size that the batch is padded to."""
        return bucket(self.with_prompts if prompts else self.batches, requests)

    def decode_rows(self, requests: int, *, prompts: bool) -> NDArray[np.int64]:
        """Return the possible numbers of decode rows of a step; see `speculation.sizes`."""
        return self._decode_rows[self.batch(requests, prompts=prompts), prompts]

    def computed(self, decode_rows: NDArray[np.int64], prompt_rows: int) -> NDArray[np.int64]:
        """Return the rows that steps compute, padding included."""
        if not prompt_rows:
            return decode_rows
        return np.array([self.prompts.padded(rows + prompt_rows) for rows in decode_rows.tolist()])

    @cached_property
    def _decode_rows(self) -> dict[tuple[int, bool], NDArray[np.int64]]:
        pure = {
            (batch, False): [rows for rows in DECODE_ROWS if batch < rows <= DENSEST * batch]
            for batch in self.batches
        }
        mixed = {
            (batch, True): [
                rows for rows in ROWS_WITH_PROMPTS if batch < rows <= DENSEST_WITH_PROMPTS * batch
            ]
            for batch in self.with_prompts
        }
        return {
            key: np.unique(np.array([key[0], *rows], np.int64))
            for key, rows in (pure | mixed).items()
        }

    def shape(self, context: StepContext, strategy: Strategy) -> StepShape:
        """Return the shape of the step of a batch."""
        shape = self.step(context.decoding, strategy, context.prefill_rows, context.chunks)
        extend = shape.extend._replace(
            filtered=context.filtered,
            edited=context.edited,
            structured=context.structured,
            adapted=context.adapted,
        )
        return shape._replace(extend=extend)

    def step(self, decoding: int, strategy: Strategy, rows: int = 0, chunks: int = 0) -> StepShape:
        """Return the shape of a step of `decoding` requests and `rows` prompt rows in `chunks`
        chunks, without filters, edits, structures or adapters.
        """
        batch = self.batch(decoding, prompts=chunks > 0)
        strategy = fitted(strategy, batch, self.depth) if decoding else OFF
        first = decode_rows(batch, strategy)
        prompt_rows = self.prompts.padded(first + rows) - first if chunks else 0
        padded_chunks = self.prompts.chunks if chunks <= self.prompts.chunks else self.max_chunks
        return StepShape(
            strategy,
            draft_key(batch, strategy) if strategy.drafter else None,
            ExtendKey(batch, first, prompt_rows, padded_chunks if chunks else 0),
        )

    def room(self, decoding: int, max_rows: int) -> int:
        """Return the prompt rows that fit in a padded step of at most `max_rows` rows without
        drafts.
        """
        batch = self.batch(decoding, prompts=True)
        return min(max_rows - decoding, max(max_rows, self.prompts.largest(batch)) - batch)

    def most_rows(self, max_rows: int) -> int:
        """Return a bound on the rows of a step, padding included."""
        return self.prompts.padded(max(MAX_VERIFIED, self.max_running) + max_rows)

    def keeps(self, key: ExtendKey) -> bool:
        """Return True if the pass is worth a graph. Steps with long prompts come in too many sizes,
        and the device takes longer than the host does to launch them.
        """
        return not key.chunks or key.decode_rows + key.prompt_rows <= self.prompts.largest(
            key.decode_rows
        )

    def at_start(self, max_rows: int, reach: Reach) -> list[DraftKey | ExtendKey]:
        """Return the keys of all passes that run once before requests are accepted."""
        return [*self.rehearsed(max_rows), *self.captured(reach)]

    def rehearsed(self, max_rows: int) -> list[ExtendKey]:
        """Return the steps to run once at start, so that no request waits for a compiler: with the
        largest prompts, many short ones, filters, edits or a structure. With drafts, even few
        prompt rows may exceed every captured step.
        """
        many = self.prompts.chunks + 1
        rows = max(max_rows, self.prompts.sizes[-1] + 1)
        large = dict.fromkeys(self.step(0, OFF, rows, chunks).extend for chunks in (1, many))
        short = [self.step(0, OFF, many, many).extend] if many <= self.max_running else []
        return [
            *(key for key in large if not self.keeps(key)),
            *short,
            ExtendKey(1, 1, filtered=True),
            ExtendKey(1, 1, edited=True),
            ExtendKey(1, 1, structured=True),
            *([ExtendKey(1, 1, adapted=True)] if self.adapters else []),
        ]

    def captured(self, reach: Reach) -> list[DraftKey | ExtendKey]:
        """Return the keys of all steps that the policy may request, largest first: pure decode
        steps and steps with short prompts.
        """
        keys: dict[DraftKey | ExtendKey, None] = {}
        for prompts, batches in ((False, self.batches), (True, self.with_prompts)):
            below = -1  # a batch of one more is the first that a bucket serves
            for batch in batches:
                requests = range(max(1, below + 1), batch + 1)
                reached = reach(requests, prompts=prompts) if requests else ()
                for strategy in dict.fromkeys((OFF, *reached)):
                    keys |= dict.fromkeys(self._keys(batch, strategy, prompts=prompts))
                below = batch
        return sorted(keys, key=_size, reverse=True)

    def captured_later(self, reach: Reach) -> list[DraftKey | ExtendKey]:
        """Return the keys to capture in idle time: those of the start, which a sleep or another
        policy may leave open, then the same steps with filters, edits, structures, adapters, and
        combinations.
        """
        keys = self.captured(reach)
        extends = [key for key in keys if isinstance(key, ExtendKey)]
        others: list[tuple[str, ...]] = [
            ("filtered",),
            ("edited",),
            ("structured",),
            ("filtered", "edited"),
            ("filtered", "structured"),
        ]
        if self.adapters:
            others = [("adapted",), *others, *((*other, "adapted") for other in others)]
        return keys + [
            key._replace(**dict.fromkeys(other, True)) for other in others for key in extends
        ]

    def _keys(
        self, batch: int, strategy: Strategy, *, prompts: bool
    ) -> Iterator[DraftKey | ExtendKey]:
        """Yield the keys of a batch. `prompts`: also those of every captured step with prompts."""
        chunks = int(prompts)
        first = self.step(batch, strategy, 0, chunks).extend.decode_rows
        for rows in self.prompts.captured(first) if prompts else [first]:
            shape = self.step(batch, strategy, rows - first, chunks)
            yield from (key for key in (shape.extend, shape.draft) if key)


def _size(key: DraftKey | ExtendKey) -> int:
    return (
        key.decode_rows + key.prompt_rows if isinstance(key, ExtendKey) else key.batch * key.width
    )
