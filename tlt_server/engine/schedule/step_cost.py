"""The expected time of a step: a fixed part, a part per decoding sequence and a part per prompt
row, fitted to measured steps.

Steps are grouped by the order of magnitude of their rows, so a size that runs for long does not
displace the others; recently seen sizes count more. Errors are relative to the time of a step. Both
kinds of rows cost the same until steps show a difference. Draft rows and contexts are not inputs:
both follow from the running sequences. No tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

NEWEST = 0.25  # weight of the newest step in the mean of its size
OUTLIER = 2.0  # a step counts for this many times its size's mean at most
AGING = 100  # steps after which a size that was not seen counts half
REFIT = 8  # steps between two fits, unless a size is new
ALIKE = 0.01  # weight of what the two kinds of rows differ by
DIFFERENCE_33 = np.array([[1.0, -1.0, 0.0], [-1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])


class StepLine(NamedTuple):
    """The time of a step by its rows, in ms: parts per decoding sequence and per prompt row, and a
    fixed part.
    """

    per_sequence: float = 0.0
    per_prompt_row: float = 0.0
    fixed: float = 0.0

    def ms(self, decoding: float, prompt_rows: float) -> float:
        return self.fixed + self.per_sequence * decoding + self.per_prompt_row * prompt_rows


@dataclass(slots=True)
class _Size:
    """Means over the newest steps of about one size."""

    decoding: float
    prompt_rows: float
    ms: float
    seen: int  # number of the newest step


class StepCost:
    def __init__(self) -> None:
        self._sizes: dict[tuple[int, int], _Size] = {}  # by the bits of both numbers of rows
        self._steps, self._fitted = 0, -REFIT  # steps seen, and when they were fitted
        self._line = StepLine()

    def observe(self, decoding: int, prompt_rows: int, ms: float) -> None:
        """Record a step of `decoding` sequences and `prompt_rows` prompt rows."""
        if not (decoding or prompt_rows) or ms <= 0:
            return
        self._steps += 1
        key = decoding.bit_length(), prompt_rows.bit_length()
        if size := self._sizes.get(key):
            size.decoding += NEWEST * (decoding - size.decoding)
            size.prompt_rows += NEWEST * (prompt_rows - size.prompt_rows)
            size.ms += NEWEST * (min(ms, OUTLIER * size.ms) - size.ms)
            size.seen = self._steps
        else:
            self._sizes[key] = _Size(decoding, prompt_rows, ms, self._steps)
            self._fitted = -REFIT

    def line(self) -> StepLine:
        """Return the expected time of steps; 0 before any was measured."""
        if self._sizes and self._steps - self._fitted >= REFIT:
            self._line, self._fitted = self._fit(), self._steps
        return self._line

    def _fit(self) -> StepLine:
        """Return the least-squares parts, none below 0."""
        sizes = self._sizes.values()
        age_N = self._steps - np.array([size.seen for size in sizes])
        ms_N = np.array([size.ms for size in sizes])
        parts_N3 = np.array([(size.decoding, size.prompt_rows, 1.0) for size in sizes])
        relative_N3 = parts_N3 / ms_N[:, None]
        weighted_3N = relative_N3.T / (1 + age_N / AGING)
        squares_33, products_3 = weighted_3N @ relative_N3, weighted_3N.sum(1)
        squares_33 += ALIKE * (squares_33[0, 0] + squares_33[1, 1]) * DIFFERENCE_33
        found_3, positive = np.zeros(3), np.ones(3, bool)
        while positive.any():
            found_3[:] = 0
            found_3[positive] = np.linalg.lstsq(
                squares_33[np.ix_(positive, positive)], products_3[positive]
            )[0]
            if (found_3 >= 0).all():
                break
            positive[found_3.argmin()] = False
        return StepLine(*found_3.tolist())
