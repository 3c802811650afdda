"""Factors that correct a profile's numbers, learned from measured steps.

A step's time is a sum of parts. The logarithm of its error is therefore about the mean of the
logarithms of its parts' factors, weighted by their shares of the time. A Kalman filter estimates
these logarithms and their uncertainty: the factor of a newly seen size moves to its measurement at
once, a well-known one moves a little. Numbers of one kind and of similar sizes should have similar
factors. One more factor, common to all steps, absorbs passing effects such as a busy machine. It
fades, so lasting errors are attributed to the measured sizes, and other sizes keep their time.

Errors are clipped before they count: steps sometimes stall, but never run too fast. Corrected
numbers that must ascend are made to (`ascending`); uncertain ones move the most.

No torch. Legend: N numbers, the common factor first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class FilterSettings:
    """Standard deviations of logarithms, about equal to relative errors."""

    noise: float = 0.08  # standard deviation in the time of a step
    common: float = 0.18  # standard deviation in the factor that all steps share
    own: float = 0.2  # standard deviation in the factor of one number
    alike: float = 1.5  # octaves of size over which factors of a kind are alike
    fade: float = 0.02  # share of the common factor that a step takes away
    doubt: float = 0.01  # share of what is known that a step makes uncertain again
    slowest: float = 0.18  # largest error that counts, where a step takes longer
    fastest: float = 0.5  # the same where it takes less time


class FactorFilter:
    def __init__(self, settings: FilterSettings = FilterSettings()) -> None:
        self._settings = settings
        self.log_N = np.zeros(1)
        self._prior_NN = np.array([[settings.common**2]])
        self._covariance_NN = self._prior_NN.copy()
        self._fades_NN = self._fading()

    @property
    def common(self) -> float:
        """The common factor of all steps."""
        return float(np.exp(self.log_N[0]))

    @property
    def variance_N(self) -> NDArray[np.float64]:
        """Return the variance of each logarithm."""
        return self._covariance_NN.diagonal()

    def add(self, sizes_M: NDArray[np.float64]) -> slice:
        """Add factors of one kind of number; return their indices. Sizes are in octaves."""
        first, settings = len(self.log_N), self._settings
        distance_MM = np.abs(sizes_M[:, None] - sizes_M)
        own_MM = settings.own**2 * np.exp(-distance_MM / settings.alike)
        self.log_N = np.concatenate((self.log_N, np.zeros(len(sizes_M))))
        self._prior_NN = _beside(self._prior_NN, own_MM)
        self._covariance_NN = _beside(self._covariance_NN, own_MM)
        self._fades_NN = self._fading()
        return slice(first, first + len(sizes_M))

    def observe(self, share_N: NDArray[np.float64], error: float) -> None:
        """Learn from a step. `error`: the logarithm of its measured over its predicted time.
        `share_N`: each number's share of that time; the common factor's share is 1.
        """
        settings = self._settings
        self.log_N[0] *= 1 - settings.fade
        covariance_NN = self._covariance_NN
        covariance_NN += self._fades_NN * (self._prior_NN - covariance_NN)
        along_N = covariance_NN @ share_N
        variance = float(share_N @ along_N) + settings.noise**2
        error = min(max(error, -settings.fastest), settings.slowest)
        self.log_N += along_N * (error / variance)
        covariance_NN -= np.outer(along_N, along_N / variance)

    def _fading(self) -> NDArray[np.float64]:
        """Return the share of each covariance that a step replaces by the prior."""
        kept_N = np.full(len(self.log_N), (1 - self._settings.doubt) ** 0.5)
        kept_N[0] = 1 - self._settings.fade
        return 1 - np.outer(kept_N, kept_N)


def ascending(values: list[float], weights: list[float]) -> list[float]:
    """Return the nearest non-descending numbers by weighted least squares: descending neighbours
    are pooled to their mean (Ayer et al., 1955).
    """
    if values == sorted(values):
        return values
    pools: list[tuple[float, float, int]] = []  # mean, weight, numbers
    for mean, weight in zip(values, weights, strict=True):
        count = 1
        while pools and pools[-1][0] > mean:
            other, heavy, many = pools.pop()
            mean = (heavy * other + weight * mean) / (heavy + weight)
            weight, count = heavy + weight, many + count
        pools.append((mean, weight, count))
    return [mean for mean, _, count in pools for _ in range(count)]


def _beside(a_NN: NDArray[np.float64], b_MM: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return a block-diagonal matrix of the two."""
    n, m = len(a_NN), len(b_MM)
    both = np.zeros((n + m, n + m))
    both[:n, :n], both[n:, n:] = a_NN, b_MM
    return both
