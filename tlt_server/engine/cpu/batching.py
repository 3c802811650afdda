"""Lays out the rows of a step from the scheduler's batch and the chosen draft nodes. No decisions
here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from tlt_kernels.cpu.rows import RowLayout, layout_rows
from tlt_server.attention.rows import KVCache, Rows
from tlt_server.engine.cpu.orders import ExtendRows
from tlt_server.engine.schedule.batch import Batch, Chunk
from tlt_server.speculation.batch import Candidates, DraftBatch
from tlt_server.wire.records import DraftLimits


def draft_batch(
    chunks: list[Chunk], limits: list[DraftLimits], page_table_SP: NDArray[np.int32]
) -> DraftBatch:
    """Return a drafter's view of the chunks that take drafts, each with its limits."""
    sequences = [chunk.sequence for chunk in chunks]
    pages = max(len(s.pages) for s in sequences)
    return DraftBatch(
        ids=[s.id for s in sequences],
        group_ids=[s.request.group_id for s in sequences],
        tokens=[s.tokens for s in sequences],
        prompt_len_B=np.array([s.prompt_len for s in sequences], np.int32),
        page_table_BP=page_table_SP[[s.batch_slot for s in sequences], :pages],
        seed_B=np.array([s.request.seed for s in sequences], np.uint64),
        temperature_B=np.array([s.request.sampling.temperature for s in sequences], np.float32),
        salts=[s.request.tenant for s in sequences],
        drafters=[limit.drafter for limit in limits],
        max_depth_B=np.array(
            [
                max(0, min(s.remaining - 1, s.capacity - s.length, limit.max_depth))
                for s, limit in zip(sequences, limits, strict=True)
            ],
            np.int32,
        ),
    )


@dataclass(frozen=True)
class LaidOut:
    """Rows ready for the model, with their origins."""

    rows: Rows
    layout: RowLayout
    # Rows whose logits are needed: roots and drafts of sampling chunks, chunk after chunk.
    sampled_R: NDArray[np.int64]
    table_WP: NDArray[np.int32]


def extend(step: LaidOut, scored: list[tuple[int, int]]) -> ExtendRows:
    """Return the order that repeats this step on workers; arrays are not copied."""
    rows, layout = step.rows, step.layout
    return ExtendRows(
        layout.token_R,
        layout.position_R,
        layout.kv_slot_R,
        layout.request_R,
        rows.base_B.numpy(),
        step.table_WP,
        layout.path_RD,
        step.sampled_R,
        scored,
    )


def lay_out(
    batch: Batch,
    page_table_SP: NDArray[np.int32],
    cache: KVCache,
    chunk_N: NDArray[np.int32],
    parent_N: NDArray[np.int32],
    candidates: Candidates,
    chosen_N: NDArray[np.int32],
) -> LaidOut:
    """Lay out the rows of `batch`. Node n of the chosen draft nodes belongs to chunk `chunk_N[n]`,
    below chosen node `parent_N[n]` (-1: its root).
    """
    chunks = batch.chunks
    pages = max(len(chunk.sequence.pages) for chunk in chunks)
    table_WP = page_table_SP[[chunk.sequence.batch_slot for chunk in chunks], :pages]
    start_W = np.array([chunk.start for chunk in chunks], np.int64)
    end_W = np.array([chunk.end for chunk in chunks], np.int64)
    tokens = np.concatenate([chunk.sequence.tokens[chunk.start : chunk.end] for chunk in chunks])
    depth = int(candidates.depth_N[chosen_N].max()) if len(chosen_N) else 0
    layout = layout_rows(
        start_W,
        end_W,
        table_WP,
        cache.page_size,
        cache.scratch_start,
        tokens,
        chunk_N,
        parent_N,
        candidates.token_N[chosen_N],
        depth,
    )
    rows = Rows(
        token_R=torch.from_numpy(layout.token_R),
        position_R=torch.from_numpy(layout.position_R),
        kv_slot_R=torch.from_numpy(layout.kv_slot_R),
        request_R=torch.from_numpy(layout.request_R),
        base_B=torch.from_numpy(end_W.astype(np.int32)),
        page_table_BP=torch.from_numpy(table_WP),
        path_RD=torch.from_numpy(layout.path_RD),
    )
    wanted = [
        np.arange(root, root + drafts + 1)
        for chunk, root, drafts in zip(chunks, layout.root_W, layout.drafts_W, strict=True)
        if chunk.samples
    ]
    sampled_R = np.concatenate(wanted) if wanted else np.zeros(0, np.int64)
    return LaidOut(rows, layout, sampled_R, table_WP)
