"""Online counts for calibrated acceptance probabilities. Slow twin:
`tests/unit/test_calibration.py`. Legend: N nodes, K cells.
"""

from __future__ import annotations

import numpy as np

from tlt_kernels.cpu.compiled import kernel


@kernel("(i4[::1], i4[::1], i1[::1], f4[::1], f8, f8, f8[::1], f8[::1], f4[::1])")
def tally(
    cell_N, parent_N, accepted_N, prior_K, prior_weight, limit, hits_K, trials_K, acceptance_K
):
    """Count every verified node whose parent is on the path, halve a cell's counts at `limit`
    trials, and refresh its acceptance probability.

    accepted_N: -1 not verified, 0 rejected or unreached, 1 accepted. Return the number of counted
    nodes.
    """
    counted = 0
    for n in range(len(cell_N)):
        if accepted_N[n] < 0 or (parent_N[n] >= 0 and accepted_N[parent_N[n]] != 1):
            continue
        k = cell_N[n]
        if trials_K[k] >= limit:
            hits_K[k] *= 0.5
            trials_K[k] *= 0.5
        hits_K[k] += accepted_N[n]
        trials_K[k] += 1
        acceptance_K[k] = np.float32(
            (prior_weight * prior_K[k] + hits_K[k]) / (prior_weight + trials_K[k])
        )
        counted += 1
    return counted
