"""Calibration of acceptance probabilities: `calibrate` counts which verified nodes were accepted,
and corrects the table that ranks the next drafts. CPU twin: `tlt_kernels.cpu.counts.tally`.

Legend: as in `tensors.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tlt_kernels.gpu.rows import padded
from tlt_kernels.gpu.target import PDL, pdl_launch, pdl_wait
from tlt_kernels.gpu.tensors import CalibrationTable, KeptRows, Nodes, RowTable, Trees


@triton.jit(do_not_specialize=["V"])
def _calibrate(
    node_V,
    on_path_V,
    parent_R,
    cell_N,
    prior_Z,
    acceptance_Z,
    hits_Z,
    trials_Z,
    V,
    prior_weight,
    limit,
    VP: tl.constexpr,
):
    """Count everything in one program. Rows of one cell write the same values."""
    pdl_launch()
    v_V = tl.arange(0, VP)
    pdl_wait()
    node_V_ = tl.load(node_V + v_V, mask=v_V < V, other=-1)
    parent_V = tl.load(parent_R + v_V, mask=node_V_ >= 0, other=0)
    tried_V = (node_V_ >= 0) & (tl.load(on_path_V + parent_V, mask=node_V_ >= 0, other=0) > 0)
    hit_V = tl.load(on_path_V + v_V, mask=tried_V, other=0)
    cell_V = tl.load(cell_N + node_V_, mask=tried_V, other=0)
    tl.atomic_add(trials_Z + cell_V, 1, mask=tried_V, sem="relaxed")
    tl.atomic_add(hits_Z + cell_V, hit_V, mask=tried_V, sem="relaxed")
    tl.debug_barrier()
    trials_V = tl.load(trials_Z + cell_V, mask=tried_V, other=0)
    hits_V = tl.load(hits_Z + cell_V, mask=tried_V, other=0)
    prior_V = tl.load(prior_Z + cell_V, mask=tried_V, other=0.0)
    tl.debug_barrier()
    tl.store(
        acceptance_Z + cell_V,
        (prior_weight * prior_V + hits_V) / (prior_weight + trials_V),
        mask=tried_V,
    )
    full_V = tried_V & (trials_V >= limit)
    tl.store(trials_Z + cell_V, trials_V // 2, mask=full_V)
    tl.store(hits_Z + cell_V, hits_V // 2, mask=full_V)


def calibrate(
    trees: Trees,
    kept: KeptRows,
    nodes: Nodes,
    rows: RowTable,
    calibration: CalibrationTable,
    *,
    decode_rows: int,
    prior_weight: float = 64.0,
    limit: int = 4096,
) -> None:
    """Count every verified node whose parent is on the path, refresh the active table, and halve
    counts that reach `limit` trials.
    """
    block = padded(decode_rows, 64, 512)
    _calibrate[(1,)](
        trees.node_V,
        kept.on_path_V,
        rows.parent_R,
        nodes.cell_BC,
        *calibration,
        decode_rows,
        prior_weight,
        limit,
        VP=block,
        num_warps=1 if block <= 64 else 4,
        **PDL,
    )
