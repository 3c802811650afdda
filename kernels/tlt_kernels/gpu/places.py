"""What the host tells the device before a step: the batch, newly begun sequences, new pages. One buffer, one copy.

The host fills an `Upload` (plain numpy over pinned memory), copies its first `used` ints to the device's buffer of the same
layout, and `apply` takes it over into the places. The batch (`place_B`, works) is read by the graphs where it lies in that buffer.

Layout (int32): header [8] | place_B | place_W | start_W | count_W | admissions [A, 14 + K] | extensions [X, 5] | payload (tokens, pages).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tlt_kernels.gpu.tensors import Places


@dataclass(frozen=True)
class UploadLayout:
    """Sizes of an upload."""

    batch: int  # decoding requests
    works: int
    admissions: int
    extensions: int
    stops: int
    payload: int  # tokens and page ids; at least one longest prompt and its pages
    idle: int  # the idle place

    @property
    def size(self) -> int:
        raise NotImplementedError

    def place_B(self, upload_U: Tensor, requests: int) -> Tensor:
        """View of the first `requests` places of the batch in a device buffer."""
        raise NotImplementedError

    def works_W(self, upload_U: Tensor, works: int) -> tuple[Tensor, Tensor, Tensor]:
        """Views (place_W, start_W, count_W)."""
        raise NotImplementedError


class Upload:
    """Fills one buffer; `begin` starts over. `admit` and `extend_pages` answer False, with nothing written, when they do not fit."""

    def __init__(self, layout: UploadLayout, buffer_U: NDArray[np.int32]) -> None:
        raise NotImplementedError

    def begin(self) -> None:
        raise NotImplementedError

    @property
    def used(self) -> int:
        """ints that have to be copied."""
        raise NotImplementedError

    @property
    def changes(self) -> bool:
        """Whether `apply` has anything to do; the batch alone needs only the copy."""
        raise NotImplementedError

    def batch(self, place_B: Sequence[int], works: Sequence[tuple[int, int, int]] = ()) -> None:
        """Decoding places in batch order (the rest of the bucket is idle), and prefill works (place, start, count)."""
        raise NotImplementedError

    def admit(self, place: int, tokens: NDArray[np.int32], *, limit: int, seed: int, temperature: float, top_p: float, min_p: float,
              top_k: int, stop_ids: Sequence[int], drafts: bool, group: int = -1, hint_page: int = -1) -> bool:
        """Begin a sequence: `tokens` is all it has (prompt and what it generated before). Its capacity is 0 until pages come.

        hint_page: the page before its first uncomputed position, whose stored feature becomes its hint; -1 = none.
        """
        raise NotImplementedError

    def extend_pages(self, place: int, first: int, pages: Sequence[int]) -> bool:
        """Pages `first`, `first + 1`, ... of a place, which are its last ones: its capacity ends with them."""
        raise NotImplementedError


def apply(upload_U: Tensor, layout: UploadLayout, places: Places, page_hint_PH: Tensor | None = None) -> None:
    """Take over admissions and extensions. A static grid, so it may stand in a graph; an upload without any costs an empty kernel."""
    raise NotImplementedError
