"""The test by which `drafter_quantization` auto goes from bfloat16 to FP8: on recorded responses
the active drafter in FP8 must keep its accept length.

The saved time is not measured: on a GPU a drafter's step takes as long as its weights are read, and
FP8 has half the bytes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tlt_server.trainer.judging.figures import ByResponse, Interval, bootstrap

MOST_LOST = 0.005  # share of the accept length
LEAST_GROUPS = 32  # prompts


class FormTest:
    def __init__(self) -> None:
        self._before_G, self._after_G = list[float](), list[float]()

    def observe(self, before: ByResponse, after: ByResponse, group_N: NDArray[np.int32]) -> None:
        """Add whole prompt groups. before, after: the drafter in bfloat16 and in FP8, on the same
        responses; group_N: of every response.
        """
        for sums, kept in ((before, self._before_G), (after, self._after_G)):
            _, place_N = np.unique(group_N[sums.response_N], return_inverse=True)
            kept += np.bincount(place_N, sums.cycles_N).tolist()

    @property
    def lost(self) -> Interval:
        """Return the share of the accept length that FP8 loses; the responses are the same, so it
        is that of the cycles.
        """
        before_G, after_G = np.array(self._before_G), np.array(self._after_G)
        return bootstrap(lambda w: 1 - (w @ before_G) / (w @ after_G), len(before_G))

    @property
    def passed(self) -> bool:
        return len(self._before_G) >= LEAST_GROUPS and self.lost.high < MOST_LOST
