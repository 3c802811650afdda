"""A bounded pool of token segments in one flat array: a group's prompts, running outputs and
finished outputs.

The history drafter has one per prompt; the matching kernel reads `tokens`, `start_G` and `length_G`
directly. A segment grows in place or moves to the end. The newest finished segments of up to `kept`
tokens stay. Beyond `limit` tokens in total the oldest of them are dropped, and a running segment
that still does not fit stops growing. Invariant: live segments never overlap (`check`).
"""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

SMALLEST = 256  # tokens of the first array
ROOM = 64  # spare tokens of a segment that moves
SEGMENTS = 4096  # finished segments kept


class TokenPool:
    def __init__(self, limit: int, kept: int | None = None) -> None:
        self.limit = limit  # tokens
        self.kept = limit if kept is None else kept  # tokens of finished segments
        self.tokens = np.zeros(SMALLEST, np.int32)
        self.start_G, self.length_G, self.room_G = (
            np.zeros(4, np.int32) for _ in range(3)
        )  # free segments have length 0
        self.used = 0  # tokens in segments
        self._end = 0  # where the unused part of the array begins
        self._free = list(range(len(self.start_G)))
        self._finished: deque[int] = deque()
        self._in_finished = 0  # tokens

    @property
    def bytes(self) -> int:
        return self.tokens.nbytes + 3 * self.start_G.nbytes

    def open(self) -> int:
        """Return a new empty segment."""
        if not self._free:
            old = len(self.start_G)
            self.start_G, self.length_G, self.room_G = (
                np.pad(a, (0, old)) for a in (self.start_G, self.length_G, self.room_G)
            )
            self._free = list(range(old, 2 * old))
        return self._free.pop()

    def append(self, segment: int, tokens: NDArray[np.int32]) -> bool:
        """Append tokens; return False and store nothing if the running segments fill the pool."""
        count = len(tokens)
        while self.used + count > self.limit and self._finished:
            self._drop_oldest()
        if self.used + count > self.limit:
            return False
        length = int(self.length_G[segment])
        if length + count > self.room_G[segment]:
            self._move(segment, 2 * (length + count) + ROOM)
        start = int(self.start_G[segment])
        self.tokens[start + length : start + length + count] = tokens
        self.length_G[segment] = length + count
        self.used += count
        return True

    def finish(self, segment: int) -> None:
        """Mark the segment as finished: it stops growing and may be dropped, oldest first."""
        self._finished.append(segment)
        self._in_finished += int(self.length_G[segment])
        self.room_G[segment] = self.length_G[segment]
        while len(self._finished) > SEGMENTS or self._in_finished > self.kept:
            self._drop_oldest()

    def check(self) -> None:
        live = sorted(
            (int(self.start_G[g]), int(self.room_G[g]), int(self.length_G[g]))
            for g in np.flatnonzero(self.room_G)
        )
        assert all(length <= room for _, room, length in live)
        assert all(
            first[0] + first[1] <= second[0] for first, second in zip(live, live[1:], strict=False)
        )
        assert not live or live[-1][0] + live[-1][1] <= self._end <= len(self.tokens)
        assert self.used == sum(length for _, _, length in live) <= self.limit
        assert self._in_finished == self.length_G[list(self._finished)].sum() <= self.kept
        assert all(self.length_G[g] == 0 == self.room_G[g] for g in self._free)

    def _drop_oldest(self) -> None:
        segment = self._finished.popleft()
        self.used -= int(self.length_G[segment])
        self._in_finished -= int(self.length_G[segment])
        self.length_G[segment] = self.room_G[segment] = 0
        self._free.append(segment)

    def _move(self, segment: int, room: int) -> None:
        """Move the segment to the end, with `room` tokens; if the array ends, compact into a larger
        one.
        """
        if self._end + room > len(self.tokens):
            old, total = self.tokens, int(self.room_G.sum())
            self.tokens = np.zeros(2 * (total + room), np.int32)
            self._end = 0
            for g in np.flatnonzero(self.room_G):
                start, length = int(self.start_G[g]), int(self.length_G[g])
                self.tokens[self._end : self._end + length] = old[start : start + length]
                self.start_G[g] = self._end
                self._end += int(self.room_G[g])
        start, length = int(self.start_G[segment]), int(self.length_G[segment])
        self.tokens[self._end : self._end + length] = self.tokens[start : start + length]
        self.start_G[segment], self.room_G[segment] = self._end, room
        self._end += room
