"""The test that a candidate drafter must pass: paired, and valid at any number of looks.

Each observation is the gain of one prompt group. A response's gain is (a - b) / max(a, b), where a
and b are its costs (expected time, or cycles) under the active drafter and under the candidate; the
group's gain is the mean over its responses, as siblings are alike. It is the saved or lost share,
in [-1, 1]. The null hypothesis: its conditional expectation, given the past, is at most 0.

The test bets on gains: wealth is multiplied by 1 + bet * gain, with a bet in [0, 1) that depends
only on earlier observations. Under the null hypothesis wealth is a non-negative supermartingale
that starts at 1, so with probability at least 1 - level it never reaches 1 / level (Ville's
inequality). The bets, and the interval of means that the bets have not disproved, follow
Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting", JRSS-B 86
(2024), with their approximate GRAPA bets.

A candidate has to pass two such tests, and the sum of costs has to agree.

1. Bets on gains cut to [-`CUT`, `CUT`] and scaled to [-1, 1]. A loss is then small, so bets may be
large, and two dozen groups prove a gain that most of them show. Candidate k since the last adoption
has level / (k (k + 1)), which sums to the level: if cut gains have a mean of at most 0, the
probability that any candidate is ever adopted is at most the level.
2. Bets on uncut gains, each candidate at the whole level. Many small gains and few large losses can
have a positive mean when cut, but not uncut. Each such candidate is adopted with a probability of
at most the level; for several of them the probabilities add up.

After an adoption the count restarts, so both bounds hold for each adopted drafter, not for a whole
run of adoptions.

Legend: K parallel tests, a dimension for simulations.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tlt_server.trainer.judging.figures import Interval

LEVEL = 0.05  # limit of the chance of a false adoption; the module says of which candidates
CUT = 0.4  # gain of a group beyond which the first test sees no difference
LARGEST_BET = 0.9  # share of the wealth; less than all, so that no observation ruins the test
INTERVAL_LEVEL = 0.05
GRID = np.linspace(-1.0, 1.0, 401)  # means that an interval tells apart


def level_of(candidate: int, level: float = LEVEL) -> float:
    """Return the first test's level for the `candidate`-th candidate since an adoption, counted
    from 0.
    """
    return level / ((candidate + 1) * (candidate + 2))


def gains(
    before_N: NDArray[np.float64], after_N: NDArray[np.float64], group_N: NDArray[np.int32]
) -> NDArray[np.float64]:
    """Return one observation per group, in order of the groups' first responses. before_N, after_N:
    costs under the active drafter and under the candidate.
    """
    if not ((before_N > 0).all() and (after_N > 0).all()):
        raise ValueError(
            "the cost of a response must be above 0: leave out responses without cycles"
        )
    gain_N = (before_N - after_N) / np.maximum(before_N, after_N)
    _, first_G, place_N = np.unique(group_N, return_index=True, return_inverse=True)
    mean_G = np.bincount(place_N, gain_N) / np.bincount(place_N)
    ordered: NDArray[np.float64] = mean_G[np.argsort(first_G)]
    return ordered


class Betting:
    """Wealth of K bettors, each against the hypothesis that the mean gain is at most its `mean_K`.

    Scaled by 1 + mean, a gain less the mean lies above -1, so a bet below 1 never loses all.
    """

    def __init__(self, mean_K: NDArray[np.float64]) -> None:
        """mean_K: in (-1, 1]."""
        self.count = 0
        self._mean_K = mean_K
        self._log_wealth_K = np.zeros(len(mean_K))
        self.most_K = np.zeros(len(mean_K))  # the largest log wealth so far
        # Mean and variance start from one made-up observation of 0 and of 1/4.
        self._sum_K, self._squares_K = np.zeros(len(mean_K)), np.full(len(mean_K), 0.25)

    def observe(self, gain_K: NDArray[np.float64]) -> None:
        """Add one observation. `ValueError` unless it lies in [-1, 1]."""
        if not (np.abs(gain_K) <= 1).all():  # also NaN
            raise ValueError(f"a gain must lie in [-1, 1], found {gain_K}")
        above_K = (gain_K - self._mean_K) / (1 + self._mean_K)
        average_K = self._sum_K / (self.count + 1)
        variance_K = self._squares_K / (self.count + 1)
        bet_K = np.clip(average_K / (variance_K + average_K**2), 0.0, LARGEST_BET)
        self._log_wealth_K = self._log_wealth_K + np.log1p(bet_K * above_K)
        self.most_K = np.maximum(self.most_K, self._log_wealth_K)
        self.count += 1
        self._sum_K = self._sum_K + above_K
        self._squares_K = self._squares_K + (above_K - self._sum_K / (self.count + 1)) ** 2


class GainInterval:
    """An interval that contains the mean gain at all times simultaneously: the means that no bettor
    has disproved. Each bound is next to the outermost mean that stands, so it is wrong only if a
    bet disproved a true hypothesis.
    """

    def __init__(self, level: float = INTERVAL_LEVEL) -> None:
        self._needed = float(np.log(2 / level))
        self._above, self._below = Betting(GRID[1:]), Betting(GRID[1:])
        self._sum = 0.0

    def observe(self, gain: float) -> None:
        self._above.observe(np.array([gain]))
        self._below.observe(np.array([-gain]))
        self._sum += gain

    @property
    def bounds(self) -> Interval:
        """Return the mean gain, with an interval that contains it at all times simultaneously."""
        count = self._above.count
        return Interval(
            self._sum / count if count else 0.0, self._least(self._above), -self._least(self._below)
        )

    def _least(self, betting: Betting) -> float:
        stands_K = betting.most_K < self._needed
        return float(GRID[int(stands_K.argmax()) if stands_K.any() else -1])


class Proof:
    """The bets on cut and on uncut gains of K candidates."""

    def __init__(self, count: int, candidate: int, level: float = LEVEL) -> None:
        """`candidate`: how many were tested before it since the last adoption."""
        self.needed = -float(np.log(level_of(candidate, level))), -float(np.log(level))
        self._bets = Betting(np.zeros(count)), Betting(np.zeros(count))

    def observe(self, gain_K: NDArray[np.float64]) -> None:
        cut, plain = self._bets
        cut.observe(np.clip(gain_K / CUT, -1.0, 1.0))
        plain.observe(gain_K)

    @property
    def found_K(self) -> NDArray[np.bool_]:
        """Return a mask of the candidates that are proven better."""
        wealth = zip(self._bets, self.needed, strict=True)
        cut_K, plain_K = (betting.most_K >= needed for betting, needed in wealth)
        return cut_K & plain_K


class AdoptionTest:
    """The test of one candidate."""

    def __init__(self, candidate: int = 0) -> None:
        """`candidate`: how many were tested before it since the last adoption."""
        self._proof, self._interval = Proof(1, candidate), GainInterval()
        self._saved, self.groups = 0.0, 0

    def observe(
        self,
        before_N: NDArray[np.float64],
        after_N: NDArray[np.float64],
        group_N: NDArray[np.int32],
    ) -> None:
        """Add the responses of more prompt groups, each group whole."""
        for gain in gains(before_N, after_N, group_N).tolist():
            self._proof.observe(np.array([gain]))
            self._interval.observe(gain)
            self.groups += 1
        self._saved += float(before_N.sum() - after_N.sum())

    @property
    def better(self) -> bool:
        """Return True if the candidate may be adopted: the bets have proven it better, and so does
        the sum of all costs, in which long responses weigh more.
        """
        return bool(self._proof.found_K[0]) and self._saved > 0

    @property
    def gain(self) -> Interval:
        return self._interval.bounds
