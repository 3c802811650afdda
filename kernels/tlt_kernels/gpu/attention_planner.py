"""The planner of a step's attention: it lists, on the device and once per step, the work of each
program in every layer.

Rows of one request form tiles. Committed keys that all rows of a tile see are read once for the
tile, by `tile` items. If every row follows the one before it (a prompt, a chain of drafts), the
last row sees all keys, so the tile needs nothing else. All other rows have `row` items: a row alone
in its tile for all its splits, a row of a tree for the splits past the shared ones.

If there are too few items to fill the machine, a context is cut: its first item folds a prefix of
the splits, and each further split is an item of its own. Every item of a cut context leaves a state
(top, sum, acc) in the workspace, and the last program to finish folds the states in order. Cuts
change no bit of a result. Tile items are listed from short to long, by kind: single short splits,
single longest ones, then starts of contexts. Their kernel walks the list from its end.

Legend: R rows, Q batch slots, P pages of a batch slot, D longest draft path, I items, W states, N
query heads, K KV heads, C rows that the planner reads together.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tlt_kernels.gpu.attention_algebra import split_of, split_start
from tlt_kernels.gpu.attention_plan import FIELDS, AttentionPlan, PagedRows, tile_residents
from tlt_kernels.gpu.target import PDL, pdl_launch, pdl_wait

_FIRST_LONG = tl.constexpr(16)  # the first of the splits that hold the most keys
_CHUNK = 256  # rows that the planner reads together
_ROW_SHARES = 2  # least parts per multiprocessor that the keys of rows are cut into
# Parts of a program's even share of tile keys. The first item of a cut tile has at least one part.
_TILE_SHARES = 2
# A cut leaves a state for each row of its tile. It pays from this many keys per row of all tiles.
_STATE_KEYS = tl.constexpr(3)


@triton.jit
def _later(a, b):
    return tl.maximum(a, b)


@triton.jit
def _earlier(a, b):
    return tl.minimum(a, b)


@triton.jit
def _follows(r_C, start, position, batch_slot, base, rows, CHUNK: tl.constexpr):
    """Return a mask of the rows that belong to the same run as the row before them."""
    inside_C = (r_C > start) & (r_C < tl.minimum(rows, start + CHUNK))
    follows_C = tl.load(position + r_C, inside_C, other=-1) >= 0
    follows_C &= tl.load(position + r_C - 1, inside_C, other=-1) >= 0
    follows_C &= tl.load(batch_slot + r_C, inside_C, other=0) == tl.load(
        batch_slot + r_C - 1, inside_C, other=1
    )
    return follows_C & (
        tl.load(base + r_C, inside_C, other=0) == tl.load(base + r_C - 1, inside_C, other=0)
    )


@triton.jit
def _continues(r_C, follows_C, position, base, path, depth):
    """Return a mask of the rows in `follows_C` that continue their predecessor: such a row sees the
    KV of the row before it, that row and itself, and nothing else. No KV slot has two parents.
    """
    before_C = tl.load(position + r_C - 1, follows_C, other=0)
    level_C = before_C - tl.load(base + r_C, follows_C, other=0)
    parent_C = tl.load(path + (r_C - 1) * depth + level_C, follows_C & (level_C >= 0), other=0)
    above_C = tl.load(path + r_C * depth + level_C, follows_C & (level_C >= 0), other=0)
    return (
        follows_C
        & (tl.load(position + r_C, follows_C, other=-1) == before_C + 1)
        & (parent_C == above_C)
    )


@triton.jit
def _tiles(
    start,
    position,
    batch_slot,
    base,
    path,
    depth,
    rows,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Describe rows [start, start + CHUNK): index, position, batch slot and base; first row and
    size of the row's tile, positions of the tile's first and last row, and whether each row of the
    tile continues the one before it.
    """
    r_C = start + tl.arange(0, CHUNK)
    position_C = tl.load(position + r_C, r_C < rows, other=-1)
    batch_slot_C, base_C = (
        tl.load(batch_slot + r_C, r_C < rows, other=0),
        tl.load(base + r_C, r_C < rows, other=0),
    )
    alive_C = position_C >= 0
    if not TILES:
        return (
            r_C,
            position_C,
            batch_slot_C,
            base_C,
            r_C,
            tl.where(alive_C, 1, 0),
            position_C,
            position_C,
            alive_C,
        )
    follows_C = _follows(r_C, start, position, batch_slot, base, rows, CHUNK)
    run_C = tl.associative_scan(tl.where(follows_C, 0, r_C), 0, _later)
    tile_C = r_C - (r_C - run_C) % TILE
    inner_C = _follows(r_C + 1, start, position, batch_slot, base, rows, CHUNK) & (
        r_C + 1 - tile_C < TILE
    )
    after_C = tl.associative_scan(
        tl.where(inner_C, start + CHUNK, r_C + 1), 0, _earlier, reverse=True
    )
    first_C, last_C = (
        tl.load(position + tile_C, alive_C, other=-1),
        tl.load(position + after_C - 1, alive_C, other=-1),
    )
    from_C = tl.associative_scan(
        tl.where(_continues(r_C, follows_C, position, base, path, depth), 0, r_C), 0, _later
    )
    inner_C &= _continues(r_C + 1, inner_C, position, base, path, depth)
    until_C = tl.associative_scan(
        tl.where(inner_C, start + CHUNK, r_C + 1), 0, _earlier, reverse=True
    )
    chain_C = (from_C <= tile_C) & (until_C == after_C)
    return (
        r_C,
        position_C,
        batch_slot_C,
        base_C,
        tile_C,
        tl.where(alive_C, after_C - tile_C, 0),
        first_C,
        last_C,
        chain_C,
    )


@triton.jit
def _pieces(position_C, base_C, size_C, first_C, last_C, chain_C, row_quota, tile_quota):
    """Cut the keys that a row shares with its tile: all that it sees, if it is alone or its tile is
    a chain. Returns splits, keys, splits of the first item and items of the shared part; splits
    past it and items of the row; states.

    In a tile certain rows precede drafts, in order of position. The shared part of a tile with a
    tree ends before any of its rows does. So every row of such a tile has an item of its own, which
    folds the row's states.
    """
    alone_C = size_C == 1
    whole_C = alone_C | chain_C
    splits_C = tl.where(
        whole_C,
        split_of(tl.maximum(last_C, 0)) + 1,
        split_of(tl.minimum(base_C, tl.maximum(first_C, 0))),
    )
    keys_C = tl.where(whole_C, last_C + 1, split_start(splits_C))
    quota_C = tl.where(alone_C, row_quota, tile_quota)
    prefix_C = tl.where(
        2 * keys_C <= 3 * quota_C, splits_C, tl.minimum(tl.maximum(split_of(quota_C), 1), splits_C)
    )
    items_C = tl.where((size_C > 0) & (splits_C > 0), 1 + splits_C - prefix_C, 0)
    rest_C = tl.where((size_C > 1) & ~whole_C, split_of(position_C) + 1 - splits_C, 0)
    row_items_C = tl.where(alone_C, items_C, tl.where(whole_C & (items_C > 1), 1, rest_C))
    states_C = items_C + rest_C
    return (
        splits_C,
        keys_C,
        prefix_C,
        items_C,
        rest_C,
        row_items_C,
        tl.where(states_C > 1, states_C, 0),
    )


@triton.jit
def _by_length(items_C, prefix_C):
    """Count the items of a tile by kind: first ones, later ones of a short split, later ones of a
    longest split.
    """
    later_C = tl.maximum(items_C - 1, 0)
    short_C = tl.minimum(later_C, tl.maximum(-prefix_C + _FIRST_LONG, 0))
    return items_C - later_C, short_C, later_C - short_C


@triton.jit(
    do_not_specialize=["depth", "rows", "states"],
    # A thread reads one row of a chunk.
    do_not_specialize_on_alignment=["position", "batch_slot", "base", "path"],
)
def _plan(
    position,
    batch_slot,
    base,
    path,
    depth,
    count,
    row_item,
    tile_item,
    state,
    rows,
    states,
    row_shares,
    tile_shares,
    KV_HEADS: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    CHUNK: tl.constexpr,
    PIECES: tl.constexpr,
):
    pdl_wait()
    pdl_launch()
    row_keys, tile_keys, tile_rows = 0, 0, 0
    for start in range(0, rows, CHUNK):
        r_C, position_C, _, base_C, tile_C, size_C, first_C, last_C, chain_C = _tiles(
            start, position, batch_slot, base, path, depth, rows, TILE, TILES, CHUNK
        )
        _, keys_C, _, _, _, _, _ = _pieces(
            position_C, base_C, size_C, first_C, last_C, chain_C, 0, 0
        )
        row_keys += tl.sum(tl.where(size_C == 1, keys_C, 0), axis=0)
        tile_keys += tl.sum(tl.where((size_C > 1) & (tile_C == r_C), keys_C, 0), axis=0)
        tile_rows += tl.sum(tl.where(size_C > 1, 1, 0), axis=0)
    row_quota = row_keys * KV_HEADS // row_shares
    tile_quota = tl.maximum(tile_keys * KV_HEADS // tile_shares, tile_rows * _STATE_KEYS)
    needed, short_tile_items, later_tile_items = states + 1, 0, 0
    while (needed > states) & (row_quota < 1 << 24):  # cut less finely until the states fit
        needed, short_tile_items, later_tile_items = 0, 0, 0
        for start in range(0, rows, CHUNK):
            r_C, position_C, _, base_C, tile_C, size_C, first_C, last_C, chain_C = _tiles(
                start, position, batch_slot, base, path, depth, rows, TILE, TILES, CHUNK
            )
            _, _, prefix_C, items_C, _, _, states_C = _pieces(
                position_C, base_C, size_C, first_C, last_C, chain_C, row_quota, tile_quota
            )
            needed += tl.sum(states_C, axis=0)
            _, shorts_C, longs_C = _by_length(
                tl.where((size_C > 1) & (tile_C == r_C), items_C, 0), prefix_C
            )
            short_tile_items += tl.sum(shorts_C, axis=0)
            later_tile_items += tl.sum(shorts_C + longs_C, axis=0)
        if needed > states:
            row_quota, tile_quota = 2 * row_quota + 128, 2 * tile_quota + 128
    row_count, state_count = 0, 0
    short_count, long_count, tile_count = 0, short_tile_items, later_tile_items
    for start in range(0, rows, CHUNK):
        r_C, position_C, batch_slot_C, base_C, tile_C, size_C, first_C, last_C, chain_C = _tiles(
            start, position, batch_slot, base, path, depth, rows, TILE, TILES, CHUNK
        )
        splits_C, _, prefix_C, items_C, rest_C, row_items_C, states_C = _pieces(
            position_C, base_C, size_C, first_C, last_C, chain_C, row_quota, tile_quota
        )
        state_C = state_count + tl.cumsum(states_C, axis=0) - states_C
        tl.store(state + r_C, state_C, r_C < rows)
        tile_items_C = tl.where((size_C > 1) & (tile_C == r_C), items_C, 0)
        row_at_C = row_count + tl.cumsum(row_items_C, axis=0) - row_items_C
        firsts_C, shorts_C, longs_C = _by_length(tile_items_C, prefix_C)
        first_at_C = tile_count + tl.cumsum(firsts_C, axis=0) - firsts_C
        short_at_C = short_count + tl.cumsum(shorts_C, axis=0) - shorts_C
        long_at_C = long_count + tl.cumsum(longs_C, axis=0) - longs_C
        before_C = tl.where((size_C > 1) & (rest_C > 0), items_C, 0)
        fold_only_C = (size_C > 1) & (rest_C == 0)
        for first_piece in range(0, tl.max(tl.maximum(row_items_C, tile_items_C), axis=0), PIECES):
            j_CJ = first_piece + tl.arange(0, PIECES)[None, :] + tl.zeros([CHUNK, PIECES], tl.int32)
            split_CJ = tl.where(
                (j_CJ == 0) & (before_C == 0)[:, None],
                0,
                tl.where(
                    (size_C == 1)[:, None], prefix_C[:, None] + j_CJ - 1, splits_C[:, None] + j_CJ
                ),
            )
            next_CJ = (
                tl.where((size_C == 1)[:, None], prefix_C[:, None], splits_C[:, None] + 1) + j_CJ
            )
            end_CJ = tl.minimum(split_start(next_CJ), position_C[:, None] + 1)
            mask_CJ = j_CJ < row_items_C[:, None]
            item_CJ = row_item + (row_at_C[:, None] + j_CJ) * FIELDS
            tl.store(item_CJ, r_C[:, None], mask_CJ)
            tl.store(item_CJ + 1, batch_slot_C[:, None], mask_CJ)
            tl.store(item_CJ + 2, base_C[:, None], mask_CJ)
            tl.store(item_CJ + 3, split_start(split_CJ), mask_CJ)
            tl.store(item_CJ + 4, tl.where(fold_only_C[:, None], 0, end_CJ), mask_CJ)
            tl.store(
                item_CJ + 5, tl.where(fold_only_C[:, None], -1, before_C[:, None] + j_CJ), mask_CJ
            )
            tl.store(item_CJ + 6, row_items_C[:, None], mask_CJ)
            tl.store(item_CJ + 7, states_C[:, None], mask_CJ)
            tl.store(item_CJ + 8, state_C[:, None], mask_CJ)
            if TILES:
                begin_CJ = tl.where(j_CJ == 0, 0, split_start(prefix_C[:, None] + j_CJ - 1))
                mask_CJ = j_CJ < tile_items_C[:, None]
                later_at_CJ = (
                    j_CJ
                    - 1
                    + tl.where(
                        j_CJ <= shorts_C[:, None],
                        short_at_C[:, None],
                        (long_at_C - shorts_C)[:, None],
                    )
                )
                item_CJ = tile_item + tl.where(j_CJ == 0, first_at_C[:, None], later_at_CJ) * FIELDS
                tl.store(item_CJ, r_C[:, None], mask_CJ)
                tl.store(item_CJ + 1, batch_slot_C[:, None], mask_CJ)
                tl.store(item_CJ + 2, size_C[:, None], mask_CJ)
                tl.store(item_CJ + 3, base_C[:, None], mask_CJ)
                tl.store(item_CJ + 4, begin_CJ, mask_CJ)
                tl.store(
                    item_CJ + 5,
                    tl.minimum(split_start(prefix_C[:, None] + j_CJ), last_C[:, None] + 1),
                    mask_CJ,
                )
                tl.store(item_CJ + 6, states_C[:, None], mask_CJ)
                tl.store(item_CJ + 7, j_CJ, mask_CJ)
        row_count += tl.sum(row_items_C, axis=0)
        tile_count += tl.sum(firsts_C, axis=0)
        short_count += tl.sum(shorts_C, axis=0)
        long_count += tl.sum(longs_C, axis=0)
        state_count += tl.sum(states_C, axis=0)
    tl.store(count, row_count)
    tl.store(count + 1, tile_count)


def fill_plan(rows: PagedRows, plan: AttentionPlan) -> None:
    """Fill `plan` for these rows. It is launched once per step, before the layers whose `attend`
    reads it.
    """
    count, kv_heads = len(rows.position_R), plan.counter_RK.shape[1]
    assert count <= plan.rows, f"{count} rows in a plan for {plan.rows}"
    tile_programs = plan.programs * tile_residents(plan.tile)
    tile_rows = plan.tile // (plan.top_WN.shape[1] // kv_heads)
    _plan[(1,)](
        rows.position_R,
        rows.batch_slot_R,
        rows.base_R,
        rows.path_RD,
        rows.path_RD.shape[1],
        plan.count_2,
        plan.row_item_IF,
        plan.tile_item_IF,
        plan.state_R,
        count,
        len(plan.top_WN),
        _ROW_SHARES * plan.programs,
        _TILE_SHARES * tile_programs,
        KV_HEADS=kv_heads,
        TILE=tile_rows,
        TILES=plan.tiles,
        CHUNK=min(_CHUNK, triton.next_power_of_2(max(count, 32))),
        PIECES=8,
        num_warps=8,
        **PDL,
    )
