"""Figures of walked cycles: accept lengths, shares by depth, length and kind of problem, time, and
paired differences with intervals.

Drafters are compared on the same responses, so common effects cancel. Intervals come from
resampling whole groups, since responses to one prompt are alike.

Legend: N responses, C cycles, G groups, D depths, K draws of a bootstrap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tlt_server.samples.samples import Responses
from tlt_server.speculation.cost import CostModel
from tlt_server.trainer.replaying.evaluate import Walked
from tlt_server.wire.records import Strategy

RESAMPLED = 2000  # bootstrap draws
DECILES = 10


class Interval(NamedTuple):
    """An estimate with an interval of 95 %."""

    value: float
    low: float
    high: float


class ByResponse(NamedTuple):
    """Sums over the cycles of each response."""

    response_N: NDArray[np.int64]  # those with cycles
    cycles_N: NDArray[np.int64]
    tokens_N: NDArray[np.int64]
    ms_N: NDArray[np.float64]  # NaN where the cost of a cycle is not known


def by_response(walked: Walked, ms_C: NDArray[np.float64] | None = None) -> ByResponse:
    response_N, place_C = np.unique(walked.response_C, return_inverse=True)
    count = len(response_N)
    ms_C = np.full(len(walked), np.nan) if ms_C is None else ms_C
    return ByResponse(
        response_N.astype(np.int64),
        np.bincount(place_C, minlength=count),
        np.bincount(place_C, walked.emitted_C, count).astype(np.int64),
        np.bincount(place_C, ms_C, count).astype(np.float64),
    )


def accept_length(walked: Walked) -> float:
    """Return the mean tokens per cycle, including the target's own."""
    return float(walked.emitted_C.sum()) / max(1, len(walked))


def by_depth(walked: Walked, depth: int) -> list[float]:
    """Return the share of cycles that accept at least 1, 2, ... `depth` drafts."""
    reached_D = [int((walked.accepted_C >= d).sum()) for d in range(1, depth + 1)]
    return [count / max(1, len(walked)) for count in reached_D]


def by_length(walked: Walked, responses: Responses) -> list[tuple[int, float]]:
    """Return for each tenth of the responses, from short to long, the length of its longest and the
    accept length.
    """
    sums = by_response(walked)
    length_N = responses.output_len_N[sums.response_N]
    order = np.argsort(length_N, kind="stable")
    return [
        (int(length_N[part].max()), float(sums.tokens_N[part].sum() / sums.cycles_N[part].sum()))
        for part in np.array_split(order, DECILES)
        if len(part)
    ]


def by_kind(walked: Walked, kinds: Sequence[str]) -> dict[str, float]:
    """Return the accept length by kind; `kinds` has one name per response."""
    kind_C = np.array(kinds)[walked.response_C]
    return {str(kind): float(walked.emitted_C[kind_C == kind].mean()) for kind in np.unique(kind_C)}


def coverage(responses: Responses, chosen: Sequence[int], vocabulary: NDArray[np.int64]) -> float:
    """Return the share of output tokens that are in a draft vocabulary."""
    outputs = [responses.tokens(n)[responses.prompt_len_N[n] :] for n in chosen]
    return float(np.isin(np.concatenate(outputs), vocabulary).mean()) if outputs else 0.0


def cycle_ms(
    walked: Walked, strategies: Sequence[Strategy], cost: CostModel, batch: int
) -> NDArray[np.float64]:
    """Return the milliseconds of each cycle, [C], in a batch of `batch` such requests."""
    ms_C = np.zeros(len(walked))
    for index, strategy in enumerate(strategies):
        same = np.flatnonzero(walked.strategy_C == index)
        rows_C = walked.rows_C[same].astype(np.int64)
        for rows in np.unique(rows_C).tolist():
            here = same[rows_C == rows]
            context = float(walked.root_C[here].mean())
            drafter = strategy.drafter if rows > 1 else ""
            seconds = cost.seconds(
                drafter, strategy.depth, strategy.width, batch, batch * rows, context=context
            )
            ms_C[here] = 1e3 * float(seconds)
    return ms_C


class MeanMs(NamedTuple):
    """Mean milliseconds; None if the cost of a cycle is unknown."""

    per_cycle: float | None
    per_token: float | None


def mean_ms(walked: Walked, ms_C: NDArray[np.float64] | None) -> MeanMs:
    tokens = int(walked.emitted_C.sum())
    if ms_C is None or not tokens:
        return MeanMs(None, None)
    return MeanMs(float(ms_C.mean()), float(ms_C.sum()) / tokens)


class Paired(NamedTuple):
    """The gain of `other` over `base`, on the responses that both have walked."""

    accept_length: Interval  # tokens of a cycle, `other` minus `base`
    per_response: Interval  # the same, each response counted once
    cycles_saved: Interval  # share of the cycles of `base`
    time_saved: Interval | None  # share of its milliseconds


def paired(base: ByResponse, other: ByResponse, group_N: NDArray[np.int32]) -> Paired:
    """Compare two drafters. group_N: of every response of the record."""
    both, at_base, at_other = np.intersect1d(base.response_N, other.response_N, return_indices=True)
    groups, place_N = np.unique(group_N[both], return_inverse=True)

    def summed(values_N: NDArray[Any]) -> NDArray[np.float64]:
        return np.bincount(place_N, values_N, len(groups)).astype(np.float64)

    tokens_N = base.tokens_N[at_base]
    mine_N, theirs_N = base.cycles_N[at_base], other.cycles_N[at_other]
    before_N, after_N = base.ms_N[at_base], other.ms_N[at_other]
    tokens_G, other_tokens_G = summed(tokens_N), summed(other.tokens_N[at_other])
    base_G, other_G = summed(mine_N), summed(theirs_N)
    gain_G = summed(other.tokens_N[at_other] / theirs_N - tokens_N / mine_N)
    count_G = summed(np.ones(len(both)))
    timed = bool(np.isfinite(before_N).all() and np.isfinite(after_N).all() and len(both))
    return Paired(
        bootstrap(
            lambda w: (w @ other_tokens_G) / (w @ other_G) - (w @ tokens_G) / (w @ base_G),
            len(groups),
        ),
        bootstrap(lambda w: (w @ gain_G) / (w @ count_G), len(groups)),
        bootstrap(lambda w: 1 - (w @ other_G) / (w @ base_G), len(groups)),
        bootstrap(lambda w: 1 - (w @ summed(after_N)) / (w @ summed(before_N)), len(groups))
        if timed
        else None,
    )


def bootstrap(figure: Any, groups: int) -> Interval:
    """Return a figure of weights [K, G], with the interval from resampled groups."""
    if not groups:
        return Interval(float("nan"), float("nan"), float("nan"))
    weights_KG = np.random.default_rng(0).multinomial(
        groups, np.full(groups, 1 / groups), size=RESAMPLED
    )
    low, high = np.percentile(figure(weights_KG.astype(np.float64)), (2.5, 97.5))
    value = figure(np.ones((1, groups)))[0]
    return Interval(float(value), float(low), float(high))


def named(kinds: Mapping[int, str], responses: Responses) -> list[str]:
    """Return the kind of each response, by its group."""
    return [kinds.get(int(group), "other") for group in responses.group_N]
