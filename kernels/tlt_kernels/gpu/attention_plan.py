"""Which programs of a step's attention do what: built on the device once per step, then used by every layer.

Rows of one request form tiles. What all rows of a tile see, committed, is read once for the tile (`tile` items); a tile of
certain rows (position < base) is done with that. Every other row has `row` items: a row that is alone in its tile for all its
splits, others for what lies past the shared splits. Where there is too little work to fill the machine a context is cut: its
first item folds a prefix of splits, each further split is an item of its own, and every one leaves a state (top, sum, acc) in
the workspace, folded in order by whoever is last. How work is cut changes no bit of a result.

Legend: R rows, Q places, P pages of a place, D longest draft path, I items, W states, N query heads, K KV heads.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tlt_kernels.gpu.attention_algebra import split_count, split_of, split_start
from tlt_kernels.gpu.target import PDL, pdl_launch, pdl_wait

PAGE = 16
FIELDS = tl.constexpr(16)  # int32 of an item
_CHUNK = 1024  # rows that the planner looks at together
_WORKSPACE = 64 << 20  # bytes for states


class PagedRows(NamedTuple):
    """Key position p of row r: `page_table_QP[place_R[r], p // 16] * 16 + p % 16` for p < base_R[r], else `path_RD[r, p - base_R[r]]`.

    All int32. A dead row has position -1. Rows of one request are contiguous and have the same base.
    """

    position_R: Tensor
    place_R: Tensor
    base_R: Tensor
    path_RD: Tensor
    page_table_QP: Tensor


class Plan(NamedTuple):
    """Work lists and workspace, for `rows` rows at most; written by `plan`, its counters left at zero by every `attend`."""

    rows: int
    tile: int  # queries of a tile
    tiles: bool  # whether rows may share tiles at all
    programs: int  # multiprocessors of the device
    row_programs: int
    tile_programs: int
    count_2: Tensor  # row items, tile items
    row_item_IF: Tensor  # row, place, base, begin, end, states before, arrivals, first state, piece
    tile_item_IF: Tensor  # first row, place, rows, begin, end, states, piece
    state_R: Tensor  # first state of a row
    counter_RK: Tensor
    top_WN: Tensor
    sum_WN: Tensor
    acc_WND: Tensor


def allocate(*, rows: int, context: int, heads: int, kv_heads: int, width: int, device: torch.device | str, tiles: bool = True,
             tile: int = 128, programs: int | None = None) -> Plan:
    """Tensors for plans of up to `rows` rows and `context` keys. `tiles` False: no two rows share a request (plain decoding)."""
    assert heads % kv_heads == 0 and heads // kv_heads <= 16, f"{heads} query heads over {kv_heads} KV heads"
    if programs is None:
        on_gpu = torch.device(device).type == "cuda"
        programs = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 4
    states = min(_WORKSPACE // (4 * heads * (width + 2)), rows * split_count(context))
    items = rows + states

    def integers(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    def floats(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=device)

    return Plan(
        rows, tile, tiles, programs, min(items * kv_heads, 4 * programs), min(items * kv_heads, programs * (256 // tile)), integers(2),
        integers(items, FIELDS.value), integers(items, FIELDS.value), integers(rows), integers(rows, kv_heads), floats(states, heads),
        floats(states, heads), floats(states, heads, width),
    )


@triton.jit
def _later(a, b):
    return tl.maximum(a, b)


@triton.jit
def _tiles(start, run, position, place, base, rows, TILE: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """Of rows [start, start + CHUNK): index, position, place, base, and of its tile: first row, rows, last position; and the last run."""
    r_C = start + tl.arange(0, CHUNK)
    position_C = tl.load(position + r_C, r_C < rows, other=-1)
    place_C, base_C = tl.load(place + r_C, r_C < rows, other=0), tl.load(base + r_C, r_C < rows, other=0)
    if WINDOW == 1:
        return r_C, position_C, place_C, base_C, r_C, tl.where(position_C >= 0, 1, 0), position_C, run
    before = (r_C > 0) & (r_C < rows)
    follows = before & (position_C >= 0) & (tl.load(position + r_C - 1, before, other=-1) >= 0)
    follows &= (tl.load(place + r_C - 1, before, other=0) == place_C) & (tl.load(base + r_C - 1, before, other=0) == base_C)
    run_C = tl.associative_scan(tl.where(follows, run, r_C), 0, _later)
    tile_C = r_C - (r_C - run_C) % TILE
    member_CW = tile_C[:, None] + tl.arange(0, WINDOW)[None, :]
    inside_CW = (member_CW < rows) & (tl.arange(0, WINDOW) < TILE)[None, :] & (position_C >= 0)[:, None]
    position_CW = tl.load(position + member_CW, inside_CW, other=-1)
    same_CW = (position_CW >= 0) & (tl.load(place + member_CW, inside_CW, other=0) == place_C[:, None])
    same_CW &= tl.load(base + member_CW, inside_CW, other=0) == base_C[:, None]
    size_C = tl.sum(same_CW.to(tl.int32), axis=1)
    last_C = tl.max(tl.where(same_CW, position_CW, -1), axis=1)
    return r_C, position_C, place_C, base_C, tile_C, size_C, last_C, tl.max(run_C, axis=0)


@triton.jit
def _pieces(position_C, base_C, size_C, last_C, row_quota, tile_quota):
    """Splits that the row (alone) or its tile shares, those of its prefix item, and items; whether tile items finish the row."""
    alone_C = size_C == 1
    certain_C = ~alone_C & (base_C > last_C)
    splits_C = tl.where(alone_C | certain_C, split_of(tl.maximum(last_C, 0)) + 1, split_of(base_C))
    keys_C = tl.where(alone_C | certain_C, last_C + 1, split_start(splits_C))
    quota_C = tl.where(alone_C, row_quota, tile_quota)
    prefix_C = tl.where(2 * keys_C <= 3 * quota_C, splits_C, tl.minimum(tl.maximum(split_of(quota_C), 1), splits_C))
    items_C = tl.where((size_C > 0) & (splits_C > 0), 1 + splits_C - prefix_C, 0)
    finished_C = certain_C & (items_C == 1)
    states_C = tl.where((alone_C & (items_C == 1)) | finished_C, 0, items_C)
    return alone_C, certain_C, splits_C, keys_C, prefix_C, items_C, finished_C, states_C


@triton.jit
def _put(item, mask, a, b, c, d, e, f, g, h, i):
    tl.store(item, a, mask)
    tl.store(item + 1, b, mask)
    tl.store(item + 2, c, mask)
    tl.store(item + 3, d, mask)
    tl.store(item + 4, e, mask)
    tl.store(item + 5, f, mask)
    tl.store(item + 6, g, mask)
    tl.store(item + 7, h, mask)
    tl.store(item + 8, i, mask)


@triton.jit(do_not_specialize=["rows", "states"])
def _plan(position, place, base, count, row_item, tile_item, state, rows, states, programs,
          KV_HEADS: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    pdl_wait()
    pdl_launch()
    row_keys, tile_keys, run = 0, 0, 0
    for start in range(0, rows, CHUNK):
        r_C, position_C, _, base_C, tile_C, size_C, last_C, run = _tiles(start, run, position, place, base, rows, TILE, WINDOW, CHUNK)
        alone_C, _, _, keys_C, _, _, _, _ = _pieces(position_C, base_C, size_C, last_C, 0, 0)
        row_keys += tl.sum(tl.where(alone_C, keys_C, 0), axis=0)
        tile_keys += tl.sum(tl.where((size_C > 1) & (tile_C == r_C), keys_C, 0), axis=0)
    row_quota, tile_quota = row_keys // (2 * programs) * KV_HEADS, tile_keys // programs * KV_HEADS
    needed = states + 1
    while needed > states:  # cut less finely until the states fit
        needed, run = 0, 0
        for start in range(0, rows, CHUNK):
            r_C, position_C, _, base_C, _, size_C, last_C, run = _tiles(start, run, position, place, base, rows, TILE, WINDOW, CHUNK)
            _, _, _, _, _, _, _, states_C = _pieces(position_C, base_C, size_C, last_C, row_quota, tile_quota)
            needed += tl.sum(states_C, axis=0)
        if needed > states:
            row_quota, tile_quota = 2 * row_quota + 128, 2 * tile_quota + 128
    row_count, tile_count, state_count, run = 0, 0, 0, 0
    for start in range(0, rows, CHUNK):
        r_C, position_C, place_C, base_C, tile_C, size_C, last_C, run = _tiles(start, run, position, place, base, rows, TILE, WINDOW, CHUNK)
        alone_C, certain_C, splits_C, _, prefix_C, items_C, finished_C, states_C = _pieces(
            position_C, base_C, size_C, last_C, row_quota, tile_quota)
        state_C = state_count + tl.cumsum(states_C, axis=0) - states_C
        tl.store(state + r_C, state_C, r_C < rows)
        row_items_C = tl.where(alone_C, items_C, tl.where((size_C > 1) & ~finished_C, 1, 0))
        tile_items_C = tl.where((size_C > 1) & (tile_C == r_C), items_C, 0)
        row_at_C = row_count + tl.cumsum(row_items_C, axis=0) - row_items_C
        tile_at_C = tile_count + tl.cumsum(tile_items_C, axis=0) - tile_items_C
        rest_C = tl.where(certain_C, 0, split_start(splits_C))
        _put(row_item + row_at_C * FIELDS, (size_C > 1) & ~finished_C, r_C, place_C, base_C, rest_C,
             tl.where(certain_C, 0, position_C + 1), items_C, 0, state_C, 0)
        most = tl.max(items_C, axis=0)
        for j in range(0, most):
            begin_C = tl.where(j == 0, 0, split_start(prefix_C + j - 1))
            end_C = tl.minimum(split_start(prefix_C + j), last_C + 1)
            _put(row_item + (row_at_C + j) * FIELDS, alone_C & (j < items_C), r_C, place_C, base_C, begin_C, end_C, 0, states_C, state_C, j)
            if WINDOW > 1:
                _put(tile_item + (tile_at_C + j) * FIELDS, j < tile_items_C, r_C, place_C, size_C, begin_C, end_C, states_C, j, 0, 0)
        row_count += tl.sum(row_items_C, axis=0)
        tile_count += tl.sum(tile_items_C, axis=0)
        state_count += tl.sum(states_C, axis=0)
    tl.store(count, row_count)
    tl.store(count + 1, tile_count)


def plan(rows: PagedRows, work: Plan) -> None:
    """Fill `work` for these rows. Launched once, before the layers whose `attend` uses it."""
    count, kv_heads = len(rows.position_R), work.counter_RK.shape[1]
    assert count <= work.rows, f"{count} rows in a plan for {work.rows}"
    tile_rows = work.tile // (work.top_WN.shape[1] // kv_heads)
    window = triton.next_power_of_2(tile_rows) if work.tiles else 1
    _plan[(1,)](
        rows.position_R, rows.place_R, rows.base_R, work.count_2, work.row_item_IF, work.tile_item_IF, work.state_R, count,
        len(work.top_WN), work.programs, KV_HEADS=kv_heads, TILE=tile_rows, WINDOW=window,
        CHUNK=min(_CHUNK // (8 if work.tiles else 1), triton.next_power_of_2(max(count, 16))), num_warps=4, **PDL,
    )
