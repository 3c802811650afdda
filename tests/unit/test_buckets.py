"""Keys of steps: what a policy can choose is captured, their number is a sum, padding holds what it
must and ends where tiles do.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlt_kernels.gpu.branches import columns
from tlt_kernels.gpu.gemm_tiles import Kind, Tile, stream_tile
from tlt_kernels.gpu.rows import MAX_NODES
from tlt_server.engine.gpu.steps.buckets import (
    BATCHES,
    DECODE_ROWS,
    MAX_DRAFTED,
    MAX_VERIFIED,
    MAX_WIDTH,
    MIN_DEPTH,
    PROMPT_CHUNKS,
    PROMPT_SIZES,
    TREE_ROWS,
    WITH_PROMPTS,
    PromptShape,
    Shapes,
    batch_buckets,
    bucket,
    decode_rows,
    fitted,
    sampled_rows,
)
from tlt_server.engine.gpu.steps.drafts import DraftKey
from tlt_server.engine.gpu.steps.extend import ExtendKey
from tlt_server.speculation.knowledge import Knowledge
from tlt_server.speculation.policies import POLICIES, Policy, Setup
from tlt_server.speculation.policies.arms import ladder
from tlt_server.speculation.policies.pinned import Pinned
from tlt_server.wire.records import OFF, Pin, Strategy

LADDER = ladder(("eagle", "history"), "cuda")
DEEPEST = 20


def policy_of(name: str, shapes: Shapes) -> Policy:
    knowledge = Knowledge(("eagle", "history"), "cuda")
    made: Policy = POLICIES.resolve(name).make(Setup(LADDER, LADDER.arms[2], knowledge, shapes))
    return made


SHAPES = [PromptShape(), PromptShape(sizes=(2, 4), chunks=2, grain=4)]
STRATEGIES = st.builds(
    Strategy,
    st.sampled_from(["eagle", "history"]),
    st.integers(1, 60),
    st.integers(1, 20),
    st.integers(2, 200),
)


def keys_of(shapes: Shapes, batch: int, strategy: Strategy) -> set[DraftKey | ExtendKey]:
    """Return what the runner asks the pool for in a step of pure decoding."""
    shape = shapes.step(batch, strategy)
    return {shape.extend, *([shape.draft] if shape.draft else [])}


def used_by(policy: Policy, shapes: Shapes) -> set[DraftKey | ExtendKey]:
    """Return the keys of steps of pure decoding, and of steps with prompts worth a graph."""
    used: set[DraftKey | ExtendKey] = set()
    for decoding in range(shapes.max_running + 1):
        if decoding:
            for strategy in policy.strategies(range(decoding, decoding + 1), prompts=False):
                used |= keys_of(shapes, decoding, strategy)
        arms = policy.strategies(range(decoding, decoding + 1), prompts=True) if decoding else [OFF]
        mixed = {
            (arm.drafter, arm.depth, arm.width, shapes.step(decoding, arm).extend): arm
            for arm in arms
        }
        for arm in mixed.values():
            for prompt_rows in range(1, 2 * PROMPT_SIZES[-1], 48):
                shape = shapes.step(decoding, arm, prompt_rows, 1)
                if shapes.keeps(shape.extend):
                    used |= {shape.extend, *([shape.draft] if shape.draft else [])}
    return used


@pytest.mark.parametrize("max_running", [1, 20])
@pytest.mark.parametrize("name", list(POLICIES))
def test_captured_graphs_are_exactly_those_policies_can_choose(name: str, max_running: int) -> None:
    shapes = Shapes(max_running, DEEPEST)
    policy = policy_of(name, shapes)
    captured = shapes.captured(policy.strategies)
    assert set(captured) == used_by(policy, shapes)
    assert len(captured) == len(set(captured))


@pytest.mark.parametrize("pinned", [(6, 7), (5, 8), (1, 200), (18, 18)])
def test_graphs_of_pins_between_two_batch_sizes_are_captured(pinned: tuple[int, int]) -> None:
    shapes = Shapes(20, DEEPEST)
    pin = Pin(*pinned, Strategy("eagle", 6, 2, 11))
    policy = Pinned(policy_of("beg", shapes), (pin,))
    assert {*shapes.captured(policy.strategies)} >= used_by(policy, shapes)


def test_graph_count_grows_as_a_sum_of_bucket_counts() -> None:
    shapes = Shapes(256, DEEPEST)
    keys = shapes.captured(policy_of("goodput", shapes).strategies)
    for batch in batch_buckets(256):
        of_batch = [key for key in keys if key.batch == batch]
        extends = [key for key in of_batch if isinstance(key, ExtendKey) and not key.prompt_rows]
        drafts = [key for key in of_batch if isinstance(key, DraftKey)]
        assert len(extends) <= len(DECODE_ROWS) and len(drafts) <= 8 * 3 + 3
    assert len(keys) < 400


@pytest.mark.parametrize("prompts", [False, True])
@pytest.mark.parametrize("max_running", [1, 7, 64, 256, 1000])
def test_predicted_decode_rows_equal_those_of_the_step(max_running: int, prompts: bool) -> None:
    shapes = Shapes(max_running, DEEPEST)
    for decoding in {1, -(-max_running // 3), max_running}:
        plain, *others = shapes.decode_rows(decoding, prompts=prompts).tolist()
        batch = shapes.batch(decoding, prompts=prompts)
        assert plain == batch == shapes.step(decoding, OFF, 1, int(prompts)).extend.decode_rows
        for rows in others:
            arm = Strategy("eagle", 3, 1, 2, rows - batch)
            key = shapes.step(decoding, arm, 40, int(prompts)).extend
            assert key.decode_rows == rows
            computed = shapes.computed(np.array([rows]), 40 * prompts)
            assert computed[0] == key.decode_rows + key.prompt_rows


def test_larger_graphs_are_captured_first() -> None:
    """Graphs share one pool, which the first of them sizes."""
    shapes = Shapes(64, DEEPEST)
    keys = shapes.captured(policy_of("goodput", shapes).strategies)
    extends = [key.decode_rows + key.prompt_rows for key in keys if isinstance(key, ExtendKey)]
    assert extends == sorted(extends, reverse=True)


@given(st.integers(1, 600))
def test_largest_bucket_holds_every_batch(max_running: int) -> None:
    sizes = batch_buckets(max_running)
    assert sizes[-1] == max_running and list(sizes) == sorted(set(sizes))
    assert all(bucket(sizes, batch) >= batch for batch in range(1, max_running + 1))


SIZES_OF_TREES = (st.integers(1, 60), st.integers(1, 20), st.integers(1, 200))


@given(
    st.integers(1, 512),
    st.builds(Strategy, st.just("eagle"), *SIZES_OF_TREES),
    st.integers(MIN_DEPTH, 60),
)
def test_a_fitted_strategy_fits_the_buffers(batch: int, strategy: Strategy, longest: int) -> None:
    cut = fitted(strategy, batch, longest)
    assert (cut == OFF) == (strategy.rows > 1 and batch >= MAX_VERIFIED), (
        "off only where roots leave no room for a draft that is asked for"
    )
    if cut == OFF:
        return
    assert 1 <= cut.depth <= longest and 1 <= cut.width <= MAX_WIDTH
    assert batch * cut.width * (cut.depth - 1) <= TREE_ROWS
    assert cut.width == 1 or batch * cut.width <= MAX_DRAFTED
    assert cut.width == 1 or batch * columns(cut.depth, cut.width) <= MAX_NODES
    assert batch <= decode_rows(batch, cut) <= max(batch, MAX_VERIFIED)
    assert fitted(cut, batch, longest) == cut


@given(
    st.integers(0, 64),
    STRATEGIES,
    st.booleans(),
    st.integers(1, 64),
    st.integers(0, 8192),
    st.sampled_from(SHAPES),
)
def test_prompt_rows_fit_and_large_steps_round_to_the_grain(
    decoding: int, arm: Strategy, drafts: bool, chunks: int, more: int, prompts: PromptShape
) -> None:
    shapes, rows = Shapes(64, MIN_DEPTH, prompts), chunks + more
    key = shapes.step(decoding, arm if drafts else OFF, rows, chunks).extend
    assert decoding <= key.batch <= key.decode_rows
    assert rows <= key.prompt_rows and chunks <= key.chunks <= 64
    total, asked = key.decode_rows + key.prompt_rows, key.decode_rows + rows
    if total not in prompts.sizes:
        assert total % prompts.grain == 0
        assert total - prompts.grain < asked
        assert asked > prompts.sizes[-1], "a grain too much"
    assert not any(asked <= size < total for size in prompts.sizes), "a size too large"


@given(st.integers(1, 600), STRATEGIES, st.data(), st.sampled_from(SHAPES))
def test_logits_buffer_fits_every_step(
    max_running: int, arm: Strategy, data: st.DataObject, prompts: PromptShape
) -> None:
    decoding = data.draw(st.integers(0, max_running))
    chunks = data.draw(st.integers(0, max_running - decoding))
    for strategy in (OFF, arm):
        shapes = Shapes(max_running, MIN_DEPTH, prompts)
        key = shapes.step(decoding, strategy, 4096 * bool(chunks), chunks).extend
        assert key.decode_rows + key.chunks <= sampled_rows(max_running)


def test_captured_prompt_steps_of_a_size_share_a_key() -> None:
    shapes = Shapes(64, MIN_DEPTH)
    for decoding in range(65):
        batch = shapes.step(decoding, OFF, 1, 1).extend.batch
        most = PROMPT_SIZES[-1] - batch
        keys = {
            shapes.step(decoding, OFF, rows, min(rows, chunks)).extend
            for rows in range(1, most + 1)
            for chunks in (1, PROMPT_CHUNKS)
        }
        sizes = sorted(key.decode_rows + key.prompt_rows for key in keys)
        assert sizes == [size for size in PROMPT_SIZES if size > batch]
        assert all(shapes.keeps(key) for key in keys)
        assert not shapes.keeps(shapes.step(decoding, OFF, most + 1, 1).extend)


@pytest.mark.parametrize("max_running", [1, 7, 64, 256, 512])
@pytest.mark.parametrize("max_rows", [1, 24, 512, 1000, 4096])
def test_full_step_with_padding_has_max_rows(max_running: int, max_rows: int) -> None:
    shapes = Shapes(max_running, MIN_DEPTH)
    for decoding in range(max_running + 1):
        room = shapes.room(decoding, max_rows)
        assert room <= max_rows - decoding
        assert room > 0 or decoding >= max_rows, "prompts wait for no reason"
        if room > 0:
            key = shapes.step(decoding, OFF, room, 1).extend
            padded, largest = (
                shapes.prompts.padded(max_rows),
                shapes.prompts.largest(key.decode_rows),
            )
            assert key.decode_rows + key.prompt_rows <= max(padded, largest)
    assert shapes.room(0, max_rows) == max_rows, "a prompt alone has every row"


MULTIPROCESSORS, GATE_UP = 132, 2 * 18944


def streamed(kind: Kind, rows: int) -> Tile:
    return stream_tile(kind, rows, GATE_UP, MULTIPROCESSORS)


def past_a_tile(rows: int) -> bool:
    """Return whether the rows leave a tile of the streaming kernel partly empty.

    The head does not count, since it computes samples only. The portable kernel pays for 512 rows
    where there are 384.
    """
    return any(rows % streamed(kind, rows).rows for kind in Kind if kind is not Kind.HEAD)


def rounds(rows: int) -> int:
    """Return the rounds of gate-up's tiles over the multiprocessors."""
    tile = streamed(Kind.GATED, rows)
    return -(-(-(-rows // tile.rows) * -(-GATE_UP // tile.columns)) // MULTIPROCESSORS)


@pytest.mark.parametrize("max_running", [*BATCHES, 100])
def test_no_step_with_prompts_ends_past_a_tile(max_running: int) -> None:
    shapes = Shapes(max_running, DEEPEST)
    policy = policy_of("goodput", shapes)
    prepared = [*shapes.captured(policy.strategies), *shapes.rehearsed(4096)]
    keys = [key for key in prepared if isinstance(key, ExtendKey) and key.chunks]
    for decoding in batch_buckets(max_running, WITH_PROMPTS):
        full = shapes.step(decoding, OFF, shapes.room(decoding, 4096), 1).extend
        assert full.decode_rows + full.prompt_rows == 4096
        arms = policy.strategies(range(decoding, decoding + 1), prompts=True) if decoding else [OFF]
        sizes = (1, 30, 100, 300, 2048)
        keys += [
            shapes.step(decoding, arm, rows, 1).extend for arm in [*arms][:12] for rows in sizes
        ]
        keys.append(full)
    assert not any(past_a_tile(key.decode_rows + key.prompt_rows) for key in keys)


def test_row_past_a_tile_costs_a_whole_row_of_tiles() -> None:
    """One row past a tile costs a row of tiles in any step, so the test above says something."""
    for full, before, after in ((512, 5, 7), (4096, 36, 39)):
        assert past_a_tile(full + 1) and (rounds(full), rounds(full + 1)) == (before, after)


def test_largest_prompts_are_rehearsed_once_per_kernel_variant() -> None:
    shapes = Shapes(64, MIN_DEPTH)
    *keys, many_short, filters, edits, halves = shapes.rehearsed(8192)
    assert filters.filtered and edits.edited and halves.structured
    assert all(map(shapes.keeps, (filters, edits, halves)))
    assert (many_short.chunks, many_short.prompt_rows) == (64, PROMPT_SIZES[0])
    assert shapes.keeps(many_short)
    assert {key.chunks for key in keys} == {PROMPT_CHUNKS, 64}
    assert not any(shapes.keeps(key) for key in keys)
    assert {key.decode_rows + key.prompt_rows for key in keys} == {8192}
    *beyond, short, filtered, edited, structured = shapes.rehearsed(PROMPT_SIZES[-1])
    assert [short, filtered, edited, structured] == [many_short, filters, edits, halves]
    assert [key.decode_rows + key.prompt_rows for key in beyond] == [768, 768]
    assert not any(map(shapes.keeps, beyond))
    few, *others = Shapes(PROMPT_CHUNKS, MIN_DEPTH).rehearsed(64)
    assert few.prompt_rows == 768 and others == [filters, edits, halves]


def test_graphs_of_adapter_steps_are_captured_last() -> None:
    def adapted(shapes: Shapes) -> list[bool]:
        keys = shapes.captured_later(policy_of("goodput", shapes).strategies)
        first = len(shapes.captured(policy_of("goodput", shapes).strategies))
        assert len(keys) == len(set(keys))
        return [key.adapted for key in keys[first:] if isinstance(key, ExtendKey)]

    without, within = adapted(Shapes(4, DEEPEST)), adapted(Shapes(4, DEEPEST, adapters=True))
    assert not any(without)
    each = len(without) // 5
    assert all(within[:each]) and len(within) == 11 * each
    assert ExtendKey(1, 1, adapted=True) in Shapes(4, DEEPEST, adapters=True).rehearsed(64)
