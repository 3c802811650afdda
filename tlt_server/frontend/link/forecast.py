"""What the engine delivers when it is full, and how much of max_tokens sequences use: learned from
steps and ends, never configured.

`Admission` asks, and tells which steps were full; others say nothing about a full engine.
Until there is enough evidence nothing is known, and nobody is refused by forecast.
"""

from __future__ import annotations

import math

from tlt_server.records import Cycle

MEMORY_S = 5.0  # full steps this long ago count 1/e
MEMORY_SEQUENCES = 256
MIN_S = 1.0  # of full steps
MIN_SEQUENCES = 16  # ended
DEVIATIONS = 2.33  # above the mean: what about 99 of 100 sequences stay below


class Forecast:
    def __init__(self) -> None:
        self._seen_s = self._seconds = self._tokens = self._running = 0.0  # all but the first fade
        self._ended = 0
        self._share = self._square = 0.0  # of max_tokens: mean, and mean of the square

    def stepped(self, cycle: Cycle) -> None:
        """A full step."""
        fade = math.exp(-cycle.step_s / MEMORY_S)
        self._seen_s += cycle.step_s
        self._seconds = self._seconds * fade + cycle.step_s
        self._tokens = self._tokens * fade + cycle.emitted
        self._running = self._running * fade + cycle.context.decoding * cycle.step_s

    def ended(self, given: int, max_tokens: int) -> None:
        """A sequence was given so many of at most `max_tokens`."""
        self._ended += 1
        weight, share = max(1 / self._ended, 1 / MEMORY_SEQUENCES), given / max_tokens
        self._share += weight * (share - self._share)
        self._square += weight * (share * share - self._square)

    def cut_off(self, given: int, max_tokens: int) -> None:
        """It would have been given more. Without these, only short ones would teach; taken as they
        are, a late start would.
        """
        self.ended(max(given, round(self.share * max_tokens)), max_tokens)

    @property
    def known(self) -> bool:
        return self._seen_s >= MIN_S and self._ended >= MIN_SEQUENCES and self._tokens > 0

    @property
    def tokens_per_s(self) -> float:
        """Of all sequences together; 0 as long as nothing is known."""
        return self._tokens / self._seconds if self.known else 0.0

    @property
    def share(self) -> float:
        """Of max_tokens that a sequence is expected to use; 0 as long as too few have ended."""
        return self._share if self._ended >= MIN_SEQUENCES else 0.0

    @property
    def long_share(self) -> float:
        """Of max_tokens that hardly any sequence goes beyond."""
        return min(
            1.0, self.share + DEVIATIONS * math.sqrt(max(0.0, self._square - self._share**2))
        )

    def seconds(self, tokens: float) -> float:
        """Until the full engine has delivered that many, to whomever."""
        return tokens * self._seconds / self._tokens if self.known else 0.0

    def sequence_seconds(self, tokens: float) -> float:
        """Until one sequence of a full engine has been given that many."""
        return self.seconds(tokens) * self._running / self._seconds if self.known else 0.0
