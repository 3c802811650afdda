"""The numbers of rows that a device computes.

A CPU computes any number of rows. A GPU replays captured graphs, so it pads a step to one of a few
sizes. Policies weigh only these sizes, and the cost model predicts the computed rows, padding
included. No torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tlt_server.wire.records import StepContext, Strategy

Rows = NDArray[np.int64]

# Draft rows per request that are weighed, and the points of the curves of gains.
POINTS = (0.0, 0.125, 0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4, 5, 6, 7, 9, 12, 15, 20, 26, 31, 48, 63)


class Reach(Protocol):
    """The strategies that a policy may choose; see `Policy.strategies`."""

    def __call__(self, requests: range, *, prompts: bool) -> Iterable[Strategy]: ...


class Recordings(Protocol):
    """The captured graphs of a device. Capturing one takes about ten steps."""

    def missing(
        self,
        context: StepContext,
        drafter: str,
        depths: Sequence[int],
        widths: Sequence[int],
        decode_rows: Rows,
    ) -> Rows:
        """Return the number of graphs that a step would lack, [depths, widths, decode rows].
        Without a drafter: those of a step without drafts, as one depth and width.
        """

    def want(self, context: StepContext, strategy: Strategy, saved_s: float) -> bool:
        """Add the time that this strategy's graphs would have saved in this step. Return True once
        the sum has reached the time of a capture, so that the step should capture them.
        """


class Sizes(Protocol):
    def batch(self, requests: int, *, prompts: bool) -> int:
        """Return the padded number of decoding requests, in a step with or without prompts."""

    def decode_rows(self, requests: int, *, prompts: bool) -> Rows:
        """Return the possible numbers of decode rows of a step, drafts included, ascending; the
        first has no drafts.
        """

    def computed(self, decode_rows: Rows, prompt_rows: int) -> Rows:
        """Return the rows of the whole step."""


class AnySize:
    """A device that needs no padding."""

    def batch(self, requests: int, *, prompts: bool) -> int:
        return requests

    def decode_rows(self, requests: int, *, prompts: bool) -> Rows:
        return np.unique(requests + np.rint(np.array(POINTS) * requests).astype(np.int64))

    def computed(self, decode_rows: Rows, prompt_rows: int) -> Rows:
        return decode_rows + prompt_rows
