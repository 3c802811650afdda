"""Model-free drafting on the device: what followed a request's last tokens before, in its own text and its siblings'.

A brute-force scan over the text of every place of the same group, ended ones included (the host reuses the place that ended
longest ago first, so a group's earlier responses serve it for a while). The longest, then latest occurrences become one trie.

Legend: as in `tensors.py`; J scanning programs per request, W matches kept.
"""

from __future__ import annotations

from torch import Tensor

from tlt_kernels.gpu.tensors import Calibration, Nodes, Places

LONGEST, SHORTEST = 16, 2  # tokens compared; shorter occurrences are ignored
SCANNERS = 64  # programs per request


def workspace(requests: int, width: int, *, device: str = "cuda") -> Tensor:
    """int64 keys of the matches that each scanning program found."""
    raise NotImplementedError


def history_nodes(place_B: Tensor, places: Places, nodes: Nodes, calibration: Calibration, match_BJW: Tensor, *, depth: int,
                  width: int) -> None:
    """Fill `nodes` (at least depth * width columns): the continuations of the `width` best matches, merged into a trie.

    calibration: 7 match lengths x 8 shares x 8 depths. survival = the parent's times the table at (match length, share of the
    parent's matches that agree, depth). Column d * width + m is the node of depth d + 1 that match m was the first to reach.
    """
    raise NotImplementedError
