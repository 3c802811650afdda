"""Accept-iff-equal on the device: walk each verified tree, end sequences, move what was kept, learn from it.

`accept` writes all that the host needs into one int32 buffer, so a cycle costs one copy to the host; `parse` reads it.

Legend: as in `tensors.py`; F = 4 + 2 (D + 1) fields of an entry's outcome; L layers, X = KV heads * head width.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tlt_kernels.gpu.tensors import Calibration, Kept, Nodes, Places, Rows, Trees


class Outcome(NamedTuple):
    """Per entry; tokens and log-probs are valid up to count_E."""

    count_E: NDArray[np.int32]  # tokens emitted, nothing behind a stop id or the limit
    accepted_E: NDArray[np.int32]  # draft rows on the path, also those that a stop id cut off
    verified_E: NDArray[np.int32]  # draft rows verified
    done_E: NDArray[np.bool_]  # the sequence has ended
    broken_E: NDArray[np.bool_]  # a log-prob was NaN: nothing was emitted, the sequence has ended
    token_EA: NDArray[np.int32]
    logprob_EA: NDArray[np.float32]


def fields(depth: int) -> int:
    """int32 fields of an entry's outcome."""
    return 4 + 2 * (max(depth, 1) + 1)


def parse(outcome_EF: NDArray[np.int32]) -> Outcome:
    raise NotImplementedError


def accept(place_B: Tensor, place_W: Tensor | None, token_S: Tensor, logprob_S: Tensor, places: Places, rows: Rows, trees: Trees, kept: Kept,
           outcome_EF: Tensor, *, decode_rows: int) -> None:
    """Follow from each root the child whose token is the target's; emit the target's tokens along the path.

    Truncates behind the first stop id or at the limit, appends to the place's text, moves its length, sets done. token_S int32 and
    logprob_S float32 are the samples of `trees.sample_row_S`.
    """
    raise NotImplementedError


def commit_kv(kept: Kept, k_LSKD: Tensor, v_LSKD: Tensor) -> None:
    """Copy the KV of accepted rows from scratch to their pages, in all layers."""
    raise NotImplementedError


def store_hints(kept: Kept, g_RH: Tensor, places: Places, page_hint_PH: Tensor) -> None:
    """Remember the fused feature of each sequence's last position, and of the last position of every page that was filled."""
    raise NotImplementedError


def calibrate(trees: Trees, kept: Kept, nodes: Nodes, rows: Rows, calibration: Calibration, *, decode_rows: int, prior_weight: float = 64.0,
              limit: float = 4096.0) -> None:
    """Count every verified node whose parent is on the path, halve counts at `limit` trials, refresh the table in force."""
    raise NotImplementedError
