"""The plan of a step's attention: its rows, its lists of items and the workspace of partial
results. `attention_planner.py` fills the lists, `attention.py` works through them.

Legend: R rows, Q batch slots, P pages of a batch slot, D longest draft path, I items, F fields, W
states, N query heads, K KV heads.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from tlt_kernels.gpu.attention_algebra import split_count

FIELDS = tl.constexpr(16)  # int32 fields per item
_WORKSPACE = 64 << 20  # bytes for states
# (programs per multiprocessor, stages): few rows wait for keys, many rows wait for each other.
_FEW_ROWS, _MANY_ROWS = (2, 3), (4, 2)


class PagedRows(NamedTuple):
    """Rows and the KV slots of their keys. Key position p of row r is in KV slot
    `page_table_QP[batch_slot_R[r], p // 16] * 16 + p % 16` for p < base_R[r], else in `path_RD[r, p
    - base_R[r]]`.

    All tensors are int32. A dead row has position -1. Rows of one request are contiguous and have
    the same base.
    """

    position_R: Tensor
    batch_slot_R: Tensor
    base_R: Tensor
    path_RD: Tensor
    page_table_QP: Tensor


class AttentionPlan(NamedTuple):
    """Item lists and workspace for at most `rows` rows. `fill_plan` writes the lists; every
    `attend` leaves the counters at zero.
    """

    rows: int
    tile: int  # queries of a tile
    tiles: bool  # whether rows may share tiles at all
    programs: int  # multiprocessors of the device
    row_residents: int  # programs of the rows' kernel on a multiprocessor, all resident at once
    row_stages: int  # stages of its loop over blocks
    row_programs: int
    tile_programs: int
    count_2: Tensor  # row items, tile items
    row_item_IF: (
        Tensor  # row, batch slot, base, begin, end, own state or -1, row items, states, first state
    )
    tile_item_IF: Tensor  # first row, batch slot, rows, base, begin, end, states, own state
    state_R: Tensor  # first state of a row
    counter_RK: Tensor
    top_WN: Tensor
    sum_WN: Tensor
    acc_WND: Tensor


def allocate(
    *,
    rows: int,
    context: int,
    heads: int,
    kv_heads: int,
    width: int,
    device: torch.device | str,
    tiles: bool = True,
    tile: int = 64,
    programs: int | None = None,
) -> AttentionPlan:
    """Return the tensors of plans for up to `rows` rows and `context` keys. `tiles` False: no two
    rows share a request (plain decoding).

    The planner needs at least three states per tree row. The workspace holds as many states as fit
    in 64 MiB, and that limits the rows.
    """
    assert heads % kv_heads == 0 and heads // kv_heads <= 16, (
        f"{heads} query heads over {kv_heads} KV heads"
    )
    if programs is None:
        on_gpu = torch.device(device).type == "cuda"
        programs = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 4
    fitting = _WORKSPACE // (4 * heads * (width + 2))
    states = min(fitting, rows * max(3, split_count(context)))
    items = rows + states

    def integers(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    def floats(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=device)

    few = programs if tiles else 2 * programs  # what a row has left after its tile is short
    residents, stages = _FEW_ROWS if rows * kv_heads <= few else _MANY_ROWS
    return AttentionPlan(
        rows,
        tile,
        tiles,
        programs,
        residents,
        stages,
        min(items * kv_heads, residents * programs),
        min(items * kv_heads, programs * tile_residents(tile)),
        integers(2),
        integers(items, FIELDS.value),
        integers(items, FIELDS.value),
        integers(rows),
        integers(rows, kv_heads),
        floats(states, heads),
        floats(states, heads),
        floats(states, heads, width),
    )


def tile_residents(tile: int) -> int:
    """Return the number of tile programs that fit on a multiprocessor together."""
    return 1 if tile == 128 else 2


def tile_of(rows: int, group: int) -> int:
    """Return the queries of a tile for requests of this many rows, each with a group of query heads
    per KV head. A tile that is mostly empty takes longer: 1.2 times as long for 2 rows of 7 heads.
    """
    return next((tile for tile in (16, 32) if rows * group <= tile), 64)
