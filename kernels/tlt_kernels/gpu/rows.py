"""The rows of an extend: which draft nodes are verified, and where prompt chunks stand.

Rows 0 .. V - 1 are roots and draft nodes, request after request, parents first; rows V .. V + P - 1 are prompt chunks. A node
never survives better than its parent, so the best nodes of the batch are whole trees.

Legend: as in `tensors.py`; P prefill rows.
"""

from __future__ import annotations

from torch import Tensor

from tlt_kernels.gpu.tensors import Kept, Nodes, Places, Rows, Trees


def select_rows(place_B: Tensor, places: Places, nodes: Nodes | None, rows: Rows, trees: Trees, kept: Kept, *, decode_rows: int,
                scratch_start: int, trash: int) -> None:
    """Lay out rows 0 .. V - 1: a root per live request and the V - live nodes of the batch that survive best.

    Ties go to the lower column, then to the earlier request. Draft row v writes its KV to scratch_start + v. Without nodes (or
    where all columns are empty) this is plain decoding. Fills `trees` for entries < B and samples < V, and empties `kept` for rows < V.
    """
    raise NotImplementedError


def layout_prefill(place_W: Tensor, start_W: Tensor, count_W: Tensor, places: Places, rows: Rows, trees: Trees, kept: Kept, *,
                   decode_rows: int, prefill_rows: int, trash: int) -> None:
    """Lay out rows V .. V + P - 1: positions [start, start + count) of every work in turn; a count of 0 is no work.

    A work samples if it reaches its sequence's end. Fills `trees` for entries B + w and samples V + w, and `kept.page_R` from V on.
    """
    raise NotImplementedError
