"""Growth of draft trees on the device: the roots of a draft graph, then one `grow` between two forwards of the drafter.

Every level's rows, nodes and slots have fixed places in their tables, so a graph can hold the whole proposal: level 0 plants W
nodes per request (columns 0 .. W - 1), each later level W * W. Which nodes are expanded is best-first: per request the W most
probable unexpanded nodes of any depth. At width 1 that is a chain.

Legend: as in `tensors.py`; W width, M rows of a level, L children given per row (at least 2: the best child's gap needs the second).
"""

from __future__ import annotations

from torch import Tensor

from tlt_kernels.gpu.tensors import Calibration, Draft, Nodes, Places

FLOOR = 0.02  # a node that survives less is not expanded: its row costs more than it brings


def columns(depth: int, width: int) -> int:
    """Nodes per request that a graph plants."""
    return width + (depth - 1) * width * width if depth else 0


def roots(place_B: Tensor, places: Places, draft: Draft, nodes: Nodes, *, depth: int, trash: int) -> None:
    """Lay out level 0: per request its last known token, and how deep drafts are of use to it; empty the node table.

    A request is dead here when it is done, is never speculated on, or has no room for a draft token and a bonus token.
    """
    raise NotImplementedError


def grow(level: int, token_ML: Tensor, z_ML: Tensor, draft: Draft, nodes: Nodes, calibration: Calibration, gap_edge_G: Tensor, *,
         requests: int, depth: int, width: int, first_slot: int, trash: int, idle: int, floor: float = FLOOR) -> None:
    """Plant the children of level `level`, whose rows have just run, and lay out level `level + 1` (none behind the last one).

    token_ML int32 target ids, best first (-1 = none), z_ML float32 their perturbed logits. Draft row x > level 0 has the slot
    first_slot + x - requests of the drafter's cache. survival = the parent's times the table at (phase, rank, bucket of the gap).
    """
    raise NotImplementedError
