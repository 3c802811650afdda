"""Slow twins of the device-side cycle, in plain numpy: dictionaries for rows and nodes, loops for
everything.

Each takes the tensors as numpy arrays (see `numpy_of`) and returns what the kernel should have
written.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tests.kernels.triton_tests import DEVICE
from tlt_kernels.gpu.tensors import PAGE_SIZE, BatchSlots, CalibrationTable
from tlt_kernels.gpu.upload import UNLIMITED

EDGES = np.array(
    (0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.35, 1.75, 2.25, 3.0, 4.0, 5.0, 6.5, 8.5, 11.0), np.float32
)


def numpy_of(group: Any) -> Any:
    """Return the same NamedTuple over numpy copies."""
    return type(group)(
        *(numpy_of(t) if isinstance(t, tuple) else t.cpu().numpy().copy() for t in group)
    )


def poison(group: Any) -> None:
    """Fill every tensor with what no kernel writes, so that an unwritten element shows."""
    for tensor in group:
        if isinstance(tensor, tuple):
            poison(tensor)
        else:
            tensor.fill_(float("nan") if tensor.is_floating_point() else -77)


def make_batch_slots(
    rng: np.random.Generator,
    batch_slots: int,
    tokens: int,
    *,
    vocabulary: int = 50,
    hidden: int = 8,
) -> BatchSlots:
    """Return batch slots with text, pages, room and a few ended or never drafted ones; the last is
    idle.
    """
    made = BatchSlots.allocate(
        batch_slots, tokens, hidden=hidden, stops=3, dtype=torch.float32, device="cpu"
    )
    pages = -(-tokens // PAGE_SIZE)
    made.token_QT[:] = torch.from_numpy(
        rng.integers(0, vocabulary, (batch_slots, tokens), dtype=np.int32)
    )
    made.page_table_QP[:] = torch.from_numpy(
        rng.permutation(batch_slots * pages).astype(np.int32).reshape(batch_slots, pages)
    )
    for q in range(batch_slots - 1):
        made.length_Q[q] = int(rng.integers(1, tokens * 3 // 4))
        made.limit_Q[q] = min(tokens, int(made.length_Q[q] + rng.integers(1, 14)))
        made.capacity_Q[q] = min(
            tokens, -(-int(made.length_Q[q] + rng.integers(0, 12)) // PAGE_SIZE) * PAGE_SIZE
        )
        made.done_Q[q] = int(rng.random() < 0.15)
        made.drafters_Q[q] = rng.choice([0, 1, 2, -1], p=[0.1, 0.4, 0.05, 0.45])
        made.max_depth_Q[q] = rng.choice([2, UNLIMITED], p=[0.2, 0.8])
    return BatchSlots(*(t.to(DEVICE) for t in made))


def children(rng: np.random.Generator, rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random children; some rows have fewer than asked for."""
    given = max(width, 2)
    token_ML = np.stack([rng.permutation(60)[:given] for _ in range(rows)]).astype(np.int32)
    z_ML = -np.sort(-rng.normal(0, 3, (rows, given)).astype(np.float32), axis=1)
    for m in range(rows):
        missing = given - int(rng.integers(0, given + 1)) if rng.random() < 0.2 else 0
        if missing:
            token_ML[m, given - missing :], z_ML[m, given - missing :] = -1, -np.inf
    return torch.from_numpy(token_ML).to(DEVICE), torch.from_numpy(z_ML).to(DEVICE)


def table(rng: np.random.Generator) -> CalibrationTable:
    return CalibrationTable.of(
        torch.from_numpy(rng.uniform(0.0, 1.0, 256).astype(np.float32)).to(DEVICE)
    )


def kv_slot_of(batch_slots: BatchSlots, batch_slot: int, position: int) -> int:
    return (
        int(batch_slots.page_table_QP[batch_slot, position // PAGE_SIZE]) * PAGE_SIZE
        + position % PAGE_SIZE
    )


def draft_limits(batch_slots: BatchSlots, batch_slot_B: np.ndarray, depth: int) -> list[int]:
    limits = []
    for q in batch_slot_B:
        length = int(batch_slots.length_Q[q])
        room = min(
            depth,
            int(batch_slots.max_depth_Q[q]),
            int(batch_slots.limit_Q[q]) - length - 1,
            int(batch_slots.capacity_Q[q]) - length,
        )
        limits.append(
            max(room, 0)
            if not batch_slots.done_Q[q] and batch_slots.drafters_Q[q] & 1 and length >= 2
            else 0
        )
    return limits


class GrownTree:
    """One request's tree: nodes by column, and the rows of each level."""

    def __init__(self, limit: int, root_position: int) -> None:
        self.limit, self.root_position = limit, root_position
        self.nodes: dict[int, dict[str, Any]] = {}
        # (column, draft row) of the level just run.
        self.rows: list[tuple[int, int] | None] = [(-1, 0)] if limit else [None]

    def plant(
        self,
        level_columns: int,
        row_ids: list[int],
        token_JL: np.ndarray,
        z_JL: np.ndarray,
        table: np.ndarray,
        width: int,
    ) -> None:
        for j, row in enumerate(self.rows):
            if row is None:
                continue
            node = row[0]
            depth = 1 if node < 0 else self.nodes[node]["depth"] + 1
            if depth > self.limit:
                continue
            for rank in range(width):
                token = int(token_JL[j, rank])
                if token < 0:
                    continue
                gap = z_JL[j, 0] - z_JL[j, max(rank, 1)]
                bucket = int((gap > EDGES).sum())
                cell = (8 * (node >= 0) + min(rank, 7)) * 16 + bucket
                above = np.float32(1) if node < 0 else self.nodes[node]["acceptance"]
                self.nodes[level_columns + j * width + rank] = {
                    "parent": node,
                    "token": token,
                    "depth": depth,
                    "cell": cell,
                    "source": row_ids[j],
                    "kv_slot": -1,
                    "acceptance": np.float32(above * np.float32(min(max(table[cell], 0), 1))),
                }

    def pick(self, width: int, floor: float, row_ids: list[int], first_kv_slot: int) -> None:
        self.rows = []
        for x in row_ids:
            found = [
                (-float(node["acceptance"]), column)
                for column, node in self.nodes.items()
                if node["kv_slot"] < 0
                and node["depth"] < self.limit
                and node["acceptance"] > np.float32(floor)
            ]
            if not found or len(self.rows) >= width:
                self.rows.append(None)
                continue
            column = min(found)[1]
            self.nodes[column]["kv_slot"] = first_kv_slot + x
            self.rows.append((column, x))

    def path(self, column: int) -> list[int]:
        """Return the columns from the root side down to this one."""
        found = []
        while column >= 0:
            found.append(column)
            column = self.nodes[column]["parent"]
        return found[::-1]


def node_key(acceptance: float, column: int, request: int) -> tuple[int, int, int]:
    """Return a sort key, smaller = better: 11 bits per octave of survival, then the lower column,
    then the earlier request.
    """
    bits, least = (int(np.float32(each).view(np.int32)) for each in (acceptance, 2.0**-16))
    octaves = (bits - least) >> 12
    return -min(max(octaves, 0), 32766), column, request


def verified_rows(
    batch_slots: BatchSlots,
    batch_slot_B: np.ndarray,
    nodes_B: list[dict[int, dict[str, Any]]],
    decode_rows: int,
    scratch_start: int,
) -> tuple[list[dict[str, Any]], list[tuple[int, int]]]:
    """Return (rows, (root, rows) per request): what `select_rows` lays out. nodes_B[b] is by
    column.
    """
    live = [not batch_slots.done_Q[q] for q in batch_slot_B]
    ranked = sorted(
        (node_key(node["acceptance"], c, b), b, c)
        for b, nodes in enumerate(nodes_B)
        for c, node in nodes.items()
        if node["acceptance"] > 0
    )
    chosen = {(b, c) for _, b, c in ranked[: decode_rows - sum(live)]}
    rows: list[dict[str, Any]] = []
    entries = []
    for b, q in enumerate(batch_slot_B):
        if not live[b]:
            entries.append((-1, 0))
            continue
        root, length = len(rows), int(batch_slots.length_Q[q])
        of_request = {"batch_slot": int(q), "base": length, "request": b}
        rows.append(
            {
                "token": int(batch_slots.token_QT[q, length - 1]),
                "position": length - 1,
                "kv_slot": kv_slot_of(batch_slots, q, length - 1),
                "path": [],
                **dict.fromkeys(("parent", "node", "column"), -1),
                **of_request,
            }
        )
        row_of = {-1: root}
        for column in sorted(c for bb, c in chosen if bb == b):
            node = nodes_B[b][column]
            row_of[column] = len(rows)
            kv_slot = scratch_start + len(rows)
            above = rows[row_of[node["parent"]]]
            rows.append(
                {
                    "token": node["token"],
                    "position": length - 1 + node["depth"],
                    "kv_slot": kv_slot,
                    "path": above["path"] + [kv_slot],
                    "parent": row_of[node["parent"]],
                    "node": 0,
                    "column": column,
                    **of_request,
                }
            )
        entries.append((root, len(rows) - root))
    return rows, entries
