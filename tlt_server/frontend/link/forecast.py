"""Forecasts the tokens/s of a full engine and the share of max_tokens that sequences use.

Both are learned from steps and ends, never configured. `Admission` passes only the steps of a full
engine, since others say nothing about one. Without enough evidence both are unknown, and no request
is refused by forecast.
"""

from __future__ import annotations

import math

from tlt_server.wire.records import Cycle

MEMORY_S = 5.0  # full steps this long ago count 1/e
MEMORY_SEQUENCES = 256
MIN_S = 1.0  # time in full steps before anything is known
MIN_SEQUENCES = 16  # ended sequences before anything is known
DEVIATIONS = 2.33  # above the mean; about 99 of 100 sequences stay below


class Forecast:
    def __init__(self) -> None:
        self._seen_s = self._seconds = self._tokens = self._running = 0.0  # all but the first fade
        self._ended = 0
        self._share = self._square = (
            0.0  # share of max_tokens: its mean, and the mean of its square
        )

    def stepped(self, cycle: Cycle) -> None:
        """Learn from a step of a full engine."""
        fade = math.exp(-cycle.step_s / MEMORY_S)
        self._seen_s += cycle.step_s
        self._seconds = self._seconds * fade + cycle.step_s
        self._tokens = self._tokens * fade + cycle.emitted
        self._running = self._running * fade + cycle.context.decoding * cycle.step_s

    def ended(self, given: int, max_tokens: int) -> None:
        """Learn from a sequence that ended with `given` of at most `max_tokens` tokens."""
        self._ended += 1
        weight, share = max(1 / self._ended, 1 / MEMORY_SEQUENCES), given / max_tokens
        self._share += weight * (share - self._share)
        self._square += weight * (share * share - self._square)

    def cut_off(self, given: int, max_tokens: int) -> None:
        """Learn from a sequence that its deadline cut off. It counts with at least the expected
        share: without such sequences only short ones would count, and with their own length a late
        start would look like a short output.
        """
        self.ended(max(given, round(self.share * max_tokens)), max_tokens)

    @property
    def known(self) -> bool:
        return self._seen_s >= MIN_S and self._ended >= MIN_SEQUENCES and self._tokens > 0

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all sequences together; 0 while unknown."""
        return self._tokens / self._seconds if self.known else 0.0

    @property
    def share(self) -> float:
        """Share of max_tokens that a sequence is expected to use; 0 until enough have ended."""
        return self._share if self._ended >= MIN_SEQUENCES else 0.0

    @property
    def long_share(self) -> float:
        """Share of max_tokens that very few sequences exceed."""
        return min(
            1.0, self.share + DEVIATIONS * math.sqrt(max(0.0, self._square - self._share**2))
        )

    def seconds(self, tokens: float) -> float:
        """Return the time in which a full engine generates this many tokens in all."""
        return tokens * self._seconds / self._tokens if self.known else 0.0

    def sequence_seconds(self, tokens: float) -> float:
        """Return the time in which one sequence of a full engine gets this many tokens."""
        return self.seconds(tokens) * self._running / self._seconds if self.known else 0.0
