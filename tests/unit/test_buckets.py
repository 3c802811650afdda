"""Keys of steps: what a policy can choose is captured, their number is a sum, and padding holds what it must."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlt_kernels.gpu.growth import columns
from tlt_kernels.gpu.rows import MAX_NODES
from tlt_server.engine.gpu.buckets import (
    LEAST_DEPTH,
    MOST_DRAFTED,
    MOST_VERIFIED,
    MOST_WIDTH,
    PROMPT_ROWS,
    PROMPT_WORKS,
    TREE_ROWS,
    PromptShape,
    batch_buckets,
    bucket,
    decode_rows,
    draft_key,
    fitted,
    keeps,
    prompt_sizes,
    reachable,
    rehearsed,
)
from tlt_server.engine.gpu.drafts import DraftKey
from tlt_server.engine.gpu.extend import ExtendKey
from tlt_server.records import OFF, StepContext, Strategy
from tlt_server.speculation.policies.arms import GPU_ROWS, ladder
from tlt_server.speculation.policies.beg import Beg
from tlt_server.speculation.policies.fixed import Fixed

LADDER = ladder(("eagle", "history"), "cuda")


def keys_of(batch: int, strategy: Strategy, max_running: int) -> set[DraftKey | ExtendKey]:
    """What the runner asks the pool for in a step of pure decoding."""
    size = bucket(batch_buckets(max_running), batch)
    strategy = fitted(strategy, size, LEAST_DEPTH)
    drafts = {draft_key(size, strategy)} if strategy.drafter else set()
    return {ExtendKey(size, decode_rows(size, strategy)), *drafts}


@pytest.mark.parametrize("max_running", [1, 3, 16, 64, 100, 256, 512])
def test_whatever_beg_can_choose_is_captured(max_running: int) -> None:
    captured = set(reachable(LADDER.arms, LADDER.rows, max_running))
    beg = Beg(LADDER.arms, rows=LADDER.rows)
    used: set[DraftKey | ExtendKey] = set()
    for batch in range(1, max_running + 1):
        context = StepContext(decoding=batch, prefill_rows=0, mean_context=100.0, speculable=batch)
        for arm in beg.buckets[beg._index(context)].arms:  # every leader and every trial is one of these
            used |= keys_of(batch, arm, max_running)
    assert used <= captured
    mixed = {ExtendKey(batch, batch, PROMPT_ROWS, PROMPT_WORKS) for batch in batch_buckets(max_running)}
    assert captured - mixed == used, "nothing is captured that nobody can reach"


def test_a_fixed_strategy_within_what_a_batch_affords_is_captured() -> None:
    arm = Strategy("eagle", 5, 2, 6)
    captured = set(reachable(LADDER.with_arm(arm).arms, LADDER.rows, 64))
    fixed = Fixed([arm])
    for batch in range(1, 17):  # 17 and more afford fewer rows: such keys are recorded behind their first run
        assert keys_of(batch, fixed.choose(StepContext(batch, 0, 100.0, batch)), 64) <= captured
    assert all(keeps(key) for key in keys_of(40, arm, 64) if isinstance(key, ExtendKey))


def test_captures_are_a_sum_not_a_product() -> None:
    keys = reachable(LADDER.arms, LADDER.rows, 256)
    assert len(keys) == len(set(keys))
    for batch in batch_buckets(256):
        extends = [key for key in keys if isinstance(key, ExtendKey) and key.batch == batch and not key.prompt_rows]
        drafts = [key for key in keys if isinstance(key, DraftKey) and key.batch == batch]
        sizes = {arm.rows for arm in LADDER.arms}
        shapes = {(arm.drafter, arm.depth, arm.width) for arm in LADDER.arms if arm != OFF}
        assert len(extends) <= len(sizes) and len(drafts) <= len(shapes)


def test_larger_keys_come_first() -> None:
    """Graphs share one pool, which the first of them sizes."""
    extends = [key.decode_rows + key.prompt_rows for key in reachable(LADDER.arms, LADDER.rows, 64) if isinstance(key, ExtendKey)]
    assert extends == sorted(extends, reverse=True)


@given(st.integers(1, 600))
def test_the_last_bucket_holds_every_batch(max_running: int) -> None:
    sizes = batch_buckets(max_running)
    assert sizes[-1] == max_running and list(sizes) == sorted(set(sizes))
    assert all(bucket(sizes, batch) >= batch for batch in range(1, max_running + 1))


@given(st.integers(1, 512), st.builds(Strategy, st.just("eagle"), st.integers(1, 60), st.integers(1, 20), st.integers(1, 200)),
       st.integers(LEAST_DEPTH, 60))
def test_a_fitted_strategy_fits_the_buffers(batch: int, strategy: Strategy, longest: int) -> None:
    cut = fitted(strategy, batch, longest)
    assert (cut == OFF) == (strategy.rows == 1 or batch >= MOST_VERIFIED), "off only where roots leave no room for a draft"
    if cut == OFF:
        return
    assert 1 <= cut.depth <= longest and 1 <= cut.width <= MOST_WIDTH
    assert batch * cut.width * (cut.depth - 1) <= TREE_ROWS
    assert cut.width == 1 or batch * cut.width <= MOST_DRAFTED
    assert cut.width == 1 or batch * columns(cut.depth, cut.width) <= MAX_NODES
    assert batch <= decode_rows(batch, cut) <= max(batch, MOST_VERIFIED)
    assert fitted(cut, batch, longest) == cut


SHAPES = [PromptShape(), PromptShape(rows=4, works=2, grain=4)]


@given(st.integers(1, 64), st.integers(0, 8192), st.sampled_from(SHAPES))
def test_prompt_rows_and_works_find_room(works: int, more: int, shape: PromptShape) -> None:
    rows = works + more
    padded_rows, padded_works = prompt_sizes(rows, works, 64, shape)
    assert rows <= padded_rows < rows + max(shape.rows, shape.grain) and works <= padded_works <= 64
    assert prompt_sizes(0, 0, 64, shape) == (0, 0)


def test_prompt_steps_of_any_size_within_the_capture_share_one_key() -> None:
    assert {prompt_sizes(rows, works, 64) for rows in range(1, PROMPT_ROWS + 1) for works in range(1, min(rows, PROMPT_WORKS) + 1)} == {
        (PROMPT_ROWS, PROMPT_WORKS)}


def test_the_largest_prompts_are_rehearsed_but_not_kept_and_filters_are_both() -> None:
    *keys, filters = rehearsed(8192, 64)
    assert filters.filtered and keeps(filters)
    assert {key.works for key in keys} == {PROMPT_WORKS, 64} and not any(keeps(key) for key in keys)
    assert rehearsed(PROMPT_ROWS, 64) == [ExtendKey(1, 1, filtered=True)] and keeps(ExtendKey(1, 1, PROMPT_ROWS, PROMPT_WORKS))


def test_ceilings_never_grow_with_the_batch() -> None:
    """`reachable` takes a bucket's ceiling from the smallest batch in it."""
    assert [rows for _, rows in GPU_ROWS] == sorted((rows for _, rows in GPU_ROWS), reverse=True)
