"""States that the engine captured: a cache for the active weight versions, bounded in bytes.

Features belong to the weights that made them. A new active version, which its first sequence may
announce, drops those of earlier versions, except the newest `staleness`; a version that returns
counts as new. Above the bound, the oldest sequences are dropped. No torch: the server reads the
trainer's settings.
"""

from __future__ import annotations

from collections.abc import Iterable

from tlt_server.samples.hidden_states import Captured, key_of
from tlt_server.samples.segments import Recorded
from tlt_server.wire.commands import MAX_TEXT_BYTES, MAX_TEXTS, Recompute


class StateStore:
    def __init__(self, bound: int, staleness: int = 0) -> None:
        """`bound`: bytes of states. `staleness`: number of versions kept before the newest."""
        self._bound, self._staleness = bound, staleness
        self._versions: list[str] = []  # the newest one last
        self._kept: dict[tuple[str, bytes], Captured] = {}  # the oldest first
        self._expected: set[bytes] = set()  # keys of sequences that are being computed again
        self._recomputed: set[tuple[str, bytes]] = set()
        self.tokens = self.size = 0

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, captured: Captured) -> None:
        """Keep a sequence's states, unless they alone exceed the bound."""
        self.renewed(captured.version)
        if _bytes(captured) > self._bound:
            return
        place = captured.version, captured.key
        if place in self._kept:
            self._drop(place)
        self._kept[place] = captured
        if captured.key in self._expected:
            self._recomputed.add(place)
        self.tokens += captured.length
        self.size += _bytes(captured)
        while self.size > self._bound:
            self._drop(next(iter(self._kept)))

    def find(self, version: str, tokens: bytes) -> Captured | None:
        """Return the states of these int32 tokens, prompt and output; None if not kept."""
        return self._kept.get((version, key_of(tokens)))

    def expect(self, command: Recompute) -> None:
        """Note the sequences whose states were requested."""
        self._expected = {key_of(text) for text in command.texts}

    def recomputed(self, captured: Captured) -> bool:
        """Return True if these states were recomputed rather than captured at their sequence's
        end.
        """
        return (captured.version, captured.key) in self._recomputed

    def having(self, version: str, entries: Iterable[Recorded]) -> list[Recorded]:
        """Return the sequences that have states of this version."""
        return [e for e in entries if self.find(version, e.sample.tokens) is not None]

    def missing(self, version: str, entries: Iterable[Recorded]) -> list[Recorded]:
        """Return the sequences without states of this version, which can be recomputed."""
        return [e for e in entries if self.find(version, e.sample.tokens) is None]

    def only(self, version: str, entries: Iterable[Recorded]) -> StateStore:
        """Return a store of these sequences' states; they stay there when they are dropped here."""
        kept = StateStore(2**62)
        for entry in entries:
            captured = self.find(version, entry.sample.tokens)
            if captured is not None:
                kept.add(captured)
        return kept

    def renewed(self, version: str) -> None:
        """Note the active version of the target."""
        if self._versions and self._versions[-1] == version:
            return
        self._versions = [*(v for v in self._versions if v != version), version]
        self._versions = self._versions[-1 - self._staleness :]
        for place in [p for p in self._kept if p[0] not in self._versions]:
            self._drop(place)

    def _drop(self, place: tuple[str, bytes]) -> None:
        captured = self._kept.pop(place)
        self._recomputed.discard(place)
        self.tokens -= captured.length
        self.size -= _bytes(captured)


def _bytes(captured: Captured) -> int:
    return len(captured.features) + len(captured.hidden)


def recompute_of(entries: Iterable[Recorded]) -> Recompute:
    """Return the command that recomputes the states of the first of these sequences: as many as fit
    in one command, without sequences that are too long for one.
    """
    texts: list[bytes] = []
    room = MAX_TEXT_BYTES
    for entry in entries:
        text = entry.sample.tokens
        if len(texts) < MAX_TEXTS and len(text) <= room:
            texts.append(text)
            room -= len(text)
    return Recompute(texts)
