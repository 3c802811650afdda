"""Paged attention against its slow twin, and the bits of every row alone, in company, as a tree
row, committed, and in prefill chunks.

Caches are NaN wherever no row may look. Tolerances: float32 sums of a few hundred products err by
about 1e-7 and the exponential by 2 ulp; bfloat16 rounds weights to 2^-9. Results are compared
before they are rounded to the type of the queries.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.triton_tests import DEVICE, assert_close, assert_same_bits, assert_same_rows, gpu

# isort: split
import triton
import triton.language as tl

from tests.kernels.attention_steps import TILE, Step, a_step, committed
from tlt_kernels.gpu.attention import AttentionPlan, attend, fill_plan
from tlt_kernels.gpu.attention_algebra import split_count, split_of, split_start, starts_split
from tlt_kernels.gpu.quantise import Quantised, quantise_rows


@triton.jit
def _splits(split, start, fresh, COUNT: tl.constexpr):
    p = tl.arange(0, COUNT)
    tl.store(split + p, split_of(p))
    tl.store(start + p, split_start(split_of(p)))
    tl.store(fresh + p, starts_split(p).to(tl.int32))


def test_splits_are_consecutive_and_hold_whole_blocks():
    count = 4096
    split_P, start_P, fresh_P = torch.empty((3, count), dtype=torch.int32, device=DEVICE)
    _splits[(1,)](split_P, start_P, fresh_P, COUNT=count)
    positions = torch.arange(count, dtype=torch.int32, device=DEVICE)
    assert split_P.diff(prepend=-torch.ones_like(split_P[:1])).tolist() == fresh_P.tolist()
    assert torch.equal(positions[fresh_P == 1], start_P.unique())
    assert not (start_P % 64).any()
    assert split_P.tolist() == [split_count(p + 1) - 1 for p in range(count)]


SHAPES = [(7, 1, 32), (4, 2, 16), (16, 2, 64)]
REQUESTS = [
    (70, 3),
    (1, 1),
    (300, 1),
    (129, 11),
    (128, 5),
    (256, 4),
    (200, -13),
    (3, -3),
    (65, -1),
    (63, 9, "chain"),
    (125, 12, "chain"),
    (256, 3, "chain"),
]  # some end where a split does


def sampled(values: tuple[Any, ...], kept: bool) -> Any:
    """One case of a complete product. What is not kept runs in `make soak` and on a GPU."""
    return pytest.param(*values, marks=() if kept else pytest.mark.soak)


STARTS = [(0, True), (0, False), (1, True), (70, True)]


@pytest.mark.parametrize(
    ("shape", "first", "root_in_pages"),
    [
        sampled((shape, *start), s == (0, 2, 1, 0)[t])
        for s, shape in enumerate(SHAPES)
        for t, start in enumerate(STARTS)
    ],
)
def test_attention_matches_its_twin_and_reads_only_visible_kv(shape, first, root_in_pages):
    step = a_step(shape, REQUESTS, dead=2, root_in_pages=root_in_pages)
    alive = (step.rows.position_R >= 0).nonzero()[:, 0]
    found, expected = step.attend(first, tile=64)[alive], step.expected(first)[alive]
    unseeing = step.rows.position_R[alive] < first
    assert not found[unseeing].any(), "rows without keys are not 0"
    assert_close("out_RND", found, expected, 1e-6)


@pytest.mark.parametrize("strict", [True, False])
def test_long_context_attention_matches_its_twin(strict):
    step = a_step((2, 1, 16), [(3200, 1), (1300, 4), (20, 1), (150, -150)])
    assert_close("out_RND", step.attend(tile=64, strict=strict), step.expected(), 1e-6)


def covers_every_row(step: Step, plan: AttentionPlan) -> None:
    """Check that every key of every row lies in exactly one item, and that an item of the row folds
    all states that the row has.
    """
    counts, positions = plan.count_2.tolist(), step.rows.position_R.tolist()
    row_items = [item[:9] for item in plan.row_item_IF[: counts[0]].tolist()]
    tile_items = [item[:8] for item in plan.tile_item_IF[: counts[1]].tolist()]
    taken: set[int] = set()
    for r, position in enumerate(positions):
        mine = [item for item in row_items if item[0] == r]
        shared = [item for item in tile_items if item[0] <= r < item[0] + item[2]]
        if position < 0:
            assert not mine and not shared
            continue
        assert all(item[3] == int(step.rows.base_R[r]) for item in shared)
        ranges = [item[4:6] for item in shared] + [item[3:5] for item in mine]
        ends = [(begin, min(end, position + 1)) for begin, end in ranges]
        keys = sorted((begin, end) for begin, end in ends if begin < end)
        assert [begin for begin, _ in keys] == [0, *(end for _, end in keys[:-1])], (r, keys)
        assert keys[-1][1] == position + 1, (r, keys)
        states = {item[6] for item in shared} | {item[7] for item in mine}
        # A tile's item carries the states of its first row.
        assert len(states) == 1 or 0 not in states, (r, states)
        if states == {0}:
            assert len(ranges) == 1
            continue
        first, folded = mine[0][8], mine[0][7]
        assert plan.state_R[r] == first
        assert all(item[6:9] == [len(mine), folded, first] for item in mine)
        own = [item[5] for item in mine if item[5] >= 0]
        assert sorted([item[7] for item in shared] + own) == list(range(folded))
        assert taken.isdisjoint(range(first, first + folded)) and first + folded <= len(plan.top_WN)
        taken.update(range(first, first + folded))


KNOWN = st.integers(1, 1700)
EDGES = st.sampled_from([64, 127, 128, 129, 256, 1024, 1280, 3072, 3584])
REQUEST = st.one_of(
    st.tuples(st.one_of(KNOWN, EDGES), st.integers(1, 20)),
    st.tuples(st.one_of(KNOWN, st.sampled_from([126, 1020])), st.integers(2, 20), st.just("chain")),
    KNOWN.flatmap(lambda known: st.tuples(st.just(known), st.integers(-min(known, 40), -1))),
)


@settings(max_examples=40, deadline=None)
@given(st.lists(REQUEST, min_size=1, max_size=6), st.sampled_from([1, 4, 132]), st.booleans())
def test_a_plan_covers_every_key_of_every_row_once(requests, programs, root_in_pages):
    step = a_step((2, 1, 16), requests, dead=1, root_in_pages=root_in_pages)
    plan = step.plan(tile=TILE, programs=programs)
    fill_plan(step.rows, plan)
    covers_every_row(step, plan)


@pytest.mark.parametrize("root_in_pages", [True, False])
def test_prompts_and_chains_run_as_tiles(root_in_pages):
    requests = [(100, 8, "chain"), (60, 20, "chain"), (90, -40)]
    step = a_step((2, 1, 16), requests, root_in_pages=root_in_pages)
    plan = step.plan(tile=2 * TILE, programs=1)
    fill_plan(step.rows, plan)
    assert plan.count_2.tolist() == [0, 1 + 2 + 3]


def test_programs_get_nearly_even_shares_of_a_long_context():
    step = a_step((7, 1, 16), [(8200, 32)])
    plan = step.plan(tile=64, programs=8)
    fill_plan(step.rows, plan)
    items = plan.tile_item_IF[: plan.count_2[1].item()].flip(0)
    blocks = ((items[:, 5] - items[:, 4] + 63) // 64).tolist()
    dealt = [0] * plan.tile_programs
    for turn in range(0, len(blocks), len(dealt)):  # to and fro, as the kernel does
        for i, item in enumerate(blocks[turn : turn + len(dealt)]):
            dealt[-1 - i if turn // len(dealt) % 2 else i] += item
    # 8: blocks of the longest split.
    assert max(blocks) == blocks[0] and max(dealt) <= sum(dealt) / len(dealt) + 8, dealt


def same_in_any_company(step: Step, first: int, chosen: list[int], **options) -> None:
    together = step.attend(first, **options)
    for tiles in (True, False):
        for r in chosen:
            alone = step.only([r]).attend(first, tiles=tiles)[0]
            assert_same_bits(f"row {r}, tiles {tiles}", alone, together[r])
    for chunk in (5, 18):
        for rows in step.rows_of:
            for start in range(0, len(rows), chunk):
                part = rows[start : start + chunk]
                found = step.only(part).attend(first, **options)
                assert_same_bits(f"rows {part}", found, together[part])


@pytest.mark.parametrize("first", [0, sampled((1,), kept=False)])
def test_row_bits_do_not_depend_on_other_rows_or_chunks(first):
    step = a_step((6, 2, 16), [(70, 3), (1, 1), (300, 1), (129, 7), (280, -21), (126, 9, "chain")])
    same_in_any_company(step, first, [0, 2, 3, 4, 11, 20, 32, 33, 35, 36, 41], tile=TILE)


@pytest.mark.parametrize("root_in_pages", [True, False])
def test_tree_row_has_the_bits_of_the_committed_row(root_in_pages):
    requests = [(126, 9), (250, 6), (128, 4), (252, 12, "chain")]
    step = a_step((7, 1, 32), requests, root_in_pages=root_in_pages)
    together = step.attend(tile=TILE)
    for r in (1, 5, 8, 9, 14, 16, 18, 20, 23, 25, 30):
        assert_same_bits(f"row {r}", committed(step, r).attend()[0], together[r])


def test_small_attention_workspace_changes_no_bit():
    step = a_step((6, 2, 16), [(700, 1), (650, 9), (520, -30)])
    plan = step.plan(tile=TILE)
    acc_WND = plan.acc_WND[:48].fill_(float("nan"))
    small = plan._replace(top_WN=plan.top_WN[:48], sum_WN=plan.sum_WN[:48], acc_WND=acc_WND)
    assert_same_bits("out_RND", step.attend(plan=small), step.attend(plan=plan))


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=gpu)])
def test_attention_output_is_rounded_once(dtype):
    step = a_step((6, 2, 16), [(70, 3), (300, 1), (280, -21)], dtype=dtype)
    exact_RND, plan = step.attend(tile=TILE), step.plan(tile=TILE)
    fill_plan(step.rows, plan)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    found_RND = attend(step.q_RND, step.k_SKD, step.v_SKD, step.rows, plan, first=0, scale=16**-0.5)
    assert found_RND.dtype == dtype
    assert_same_bits("out_RND", found_RND, exact_RND.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=gpu)])
@pytest.mark.parametrize("shape", [(2, 1, 128), (4, 2, 64), (6, 1, 64), (2, 2, 256), (8, 1, 16)])
def test_quantised_outputs_are_those_of_rounded_rows(shape, dtype):
    step = a_step(shape, [(70, 3), (300, 1), (280, -5), (1, 1)], dtype=dtype)
    plan = step.plan(tile=TILE)

    def attended(quantised: bool) -> torch.Tensor | Quantised:
        fill_plan(step.rows, plan)
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        caches, how = (step.q_RND, step.k_SKD, step.v_SKD), {"first": 1, "scale": 0.1}
        return attend(*caches, step.rows, plan, quantised=quantised, **how)

    found, expected = attended(quantised=True), attended(quantised=False)
    assert_same_rows(found, quantise_rows(expected.view(len(expected), -1)))


def test_heads_that_share_no_whole_block_are_not_quantised():
    step = a_step((3, 1, 64), [(5, 2)])
    plan = step.plan()
    fill_plan(step.rows, plan)
    caches, how = (step.q_RND, step.k_SKD, step.v_SKD), {"first": 0, "scale": 0.1}
    found = attend(*caches, step.rows, plan, quantised=True, **how)
    assert isinstance(found, torch.Tensor) and found.shape == step.q_RND.shape


BIG = [
    (640, 32),
    (400, 1),
    (5000, 1),
    (5100, 8),
    (1500, -700),
    (130, -130),
    (5115, 12, "chain"),
    (300, 8, "chain"),
]


@gpu
@pytest.mark.parametrize("tile", [16, 32, 64, 128])
@pytest.mark.parametrize("shape", [(28, 4, 128), (32, 8, 64), (4, 2, 32), (32, 4, 128)])
def test_attention_on_the_gpu_matches_its_twin_and_repeats(shape, tile):
    step = a_step(shape, BIG, dtype=torch.bfloat16)
    chosen = [0, 7, 31, 32, 33, 34, 41, 42, 300, 741, 742, 800, 871, 872, 876, 881, 884, 891]
    found = step.attend(tile=tile)
    assert_close("out_RND", found[chosen], step.only(chosen).expected(), 5e-3)
    same_in_any_company(step, 0, chosen, tile=tile)
    for r in (5, 31, 36, 875, 883, 891):
        assert_same_bits(f"row {r} committed", committed(step, r).attend()[0], found[r])


@gpu
def test_unordered_split_attention_on_gpu_matches_its_twin():
    step = a_step((28, 4, 128), BIG, dtype=torch.bfloat16)
    chosen = [0, 7, 31, 32, 33, 41, 300, 741, 742, 871, 876, 883, 891]
    found = step.attend(tile=64, strict=False)[chosen]
    assert_close("out_RND", found, step.only(chosen).expected(), 5e-3)


@gpu
def test_drafter_rows_start_at_position_one():
    step = a_step((28, 4, 128), BIG, dtype=torch.bfloat16)
    same_in_any_company(step, 1, [0, 31, 33, 40, 500, 876, 891], tile=128)
