"""Two responses and what was verified of them."""

from __future__ import annotations

import numpy as np

from tlt_kernels.filters import NO_FILTERS
from tlt_server.samples.samples import Legend, Responses, SampleSet, Verifications, filters_of
from tlt_server.wire.records import OFF, Strategy


def samples() -> SampleSet:
    """Return 3 prompt tokens with 4 output tokens, then 2 with 3."""
    legend = Legend(
        vocab_size=50,
        versions=("a", "b"),
        end_reasons=("stop", "length"),
        strategies=(OFF, Strategy("eagle", 3, 2, 6)),
    )
    responses = Responses(
        token_T=np.array([1, 2, 3, 10, 11, 12, 13, 4, 5, 20, 21, 22], np.int32),
        start_N=np.array([0, 7], np.int64),
        prompt_len_N=np.array([3, 2], np.int32),
        group_N=np.array([0, 1], np.int32),
        seed_N=np.array([7, 8], np.uint64),
        temperature_N=np.array([1, 0.5], np.float32),
        filters_N=filters_of([NO_FILTERS, NO_FILTERS]),
        max_tokens_N=np.array([4, 9], np.int32),
        end_N=np.array([1, 0], np.uint8),
        span_request_S=np.array([0, 0, 1], np.int32),
        span_start_S=np.array([0, 2, 0], np.int32),
        span_version_S=np.array([0, 1, 1], np.int32),
    )
    verified = Verifications(
        request_V=np.array([0, 0, 1], np.int32),
        root_V=np.array([3, 4, 2], np.int32),
        rows_V=np.array([1, 6, 6], np.uint16),
        accepted_V=np.array([0, 2, 1], np.uint8),
        own_rows_V=np.array([1, 5, 0], np.uint16),
        own_accepted_V=np.array([0, 1, 0], np.uint8),
        strategy_V=np.array([0, 1, 1], np.uint16),
        calibration_V=np.zeros(3, np.uint16),
    )
    return SampleSet(legend, responses, verified)
