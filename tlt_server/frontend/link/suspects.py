"""Requests and keys that may have crashed the engine.

A request is refused if it ran at two crashes, was on trial or alone at the second, and had made no
progress in between.

A request is identified by its key and its computation (prompt and sampling), not by its id or by a
seed that the server chose; one with a structured output by its key and the form of its grammar, as
its numbers and names are easily varied. After a crash suspects run one at a time: each until it has
completed a step or, if it was at the same position at both crashes, until it is past that position.
So no request is refused for running alongside the one that crashes the engine. One that completes
is cleared. The number of suspects is bounded, and they are forgotten after a while.
"""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from tlt_server.errors import Unavailable
from tlt_server.wire.records import CHUNK_TOKENS, GenerateRequest

KEPT = 4096  # requests remembered
KEPT_S = 900.0  # after the last crash
# Output tokens that may be lost with the engine, a chunk and those of a step, so the same place can
# look earlier by this many.
UNHEARD = CHUNK_TOKENS + 16
WORDS = re.compile(r"[\w\s]+")  # numbers, names and spaces of a grammar


@dataclass
class _Suspect:
    tokens: int  # output tokens it had at the last crash
    at_s: float
    again: bool  # it was as far at the crash before
    refused: bool


class Sorted(NamedTuple):
    """Requests sorted by suspicion, each list in the order given."""

    free: list[GenerateRequest]
    suspect: list[GenerateRequest]
    refused: list[GenerateRequest]


class Suspects:
    def __init__(self) -> None:
        self._suspects = OrderedDict[bytes, _Suspect]()  # in order of the last crash

    def crashed(
        self,
        running: Iterable[tuple[GenerateRequest, int]],
        tried: GenerateRequest | None,
        now_s: float,
    ) -> None:
        """Suspect the requests that ran when the engine died, each given with its number of output
        tokens. Choices of one request count as the furthest one. `tried`: the request on trial, or
        the only one.
        """
        furthest: dict[bytes, int] = {}
        for request, tokens in running:
            key = fingerprint(request)
            furthest[key] = max(tokens, furthest.get(key, 0))
        self._forget(now_s)
        alone = fingerprint(tried) if tried is not None else b""
        for key, tokens in furthest.items():
            before = self._suspects.get(key)
            again = before is not None and before.tokens - UNHEARD <= tokens <= before.tokens
            refused = before is not None and (before.refused or (again and key == alone))
            self._suspects[key] = _Suspect(tokens, now_s, again, refused)
            self._suspects.move_to_end(key)
        while len(self._suspects) > KEPT:
            self._suspects.popitem(last=False)

    def sort(self, requests: Sequence[GenerateRequest], now_s: float) -> Sorted:
        """Sort requests into free, suspect and refused. Nothing is hashed while there are no
        suspects.
        """
        self._forget(now_s)
        if not self._suspects:
            return Sorted([*requests], [], [])
        kinds, keys = Sorted([], [], []), dict[tuple[int, int, str], bytes]()
        for request in requests:
            # Equal for all choices of an item.
            same = id(request.token_ids), id(request.sampling), request.owner
            key = keys[same] = keys.get(same) or fingerprint(request)
            known = self._suspects.get(key)
            (
                kinds.free if known is None else kinds.refused if known.refused else kinds.suspect
            ).append(request)
        return kinds

    def trial(self, request: GenerateRequest) -> int:
        """Return the output tokens of a trial: it is over when the request has more than that."""
        known = self._suspects.get(fingerprint(request))
        return known.tokens if known is not None and known.again else 0

    def completed(self, request: GenerateRequest) -> None:
        if self._suspects:
            self._suspects.pop(fingerprint(request), None)

    def _forget(self, now_s: float) -> None:
        while self._suspects and now_s - next(iter(self._suspects.values())).at_s >= KEPT_S:
            self._suspects.popitem(last=False)


def fingerprint(request: GenerateRequest) -> bytes:
    grammar = request.sampling.structured_outputs
    computes: object = (request.token_ids, request.sampling)
    if grammar is not None:
        computes = (grammar.kind, WORDS.sub("x", grammar.text))
    return hashlib.sha256(msgspec.msgpack.encode((request.owner, computes))).digest()


DEATHS = 2  # within the window, before a key rests
FIRST_S, MAX_S = 15.0, 600.0
KEYS = 1024  # remembered


@dataclass
class _Blamed:
    last_s: float
    deaths: int = 1  # in a row, each within the window after the one before or after the rest
    until_s: float = 0.0  # the end of the rest


class Rests:
    """Keys that rest because their requests crash the engine repeatedly.

    A death counts against a key if only its requests ran, or one of them was on trial. After two
    such deaths within the restart window, new requests of the key are refused for a time that
    doubles with each further death. Keys whose requests merely ran alongside are not affected.
    """

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._blamed = OrderedDict[str, _Blamed]()  # by key, in order of the last death

    def died(self, owner: str, now_s: float) -> None:
        """Count a death that only requests of this key can have caused. Without keys `owner` is
        empty: callers cannot be distinguished, so none rests.
        """
        if not owner:
            return
        known = self._blamed.get(owner)
        if known is None or now_s - max(known.last_s, known.until_s) > self._window_s:
            known = self._blamed[owner] = _Blamed(now_s)
        else:
            known.deaths, known.last_s = known.deaths + 1, now_s
            rest_s = min(FIRST_S * 2.0 ** min(known.deaths - DEATHS, 32), MAX_S)
            known.until_s = now_s + rest_s
        self._blamed.move_to_end(owner)
        while len(self._blamed) > KEYS:
            self._blamed.popitem(last=False)

    def check(self, owner: str, now_s: float) -> None:
        """Raise `Unavailable` while this key rests."""
        known = self._blamed.get(owner)
        if known is not None and now_s < known.until_s:
            left_s = known.until_s - now_s
            raise Unavailable(
                f"the engine died {known.deaths} times with requests of this key alone, so the "
                f"key rests for {left_s:.0f} s; find the request that causes it (the server's log "
                "names those that ran), leave it out, and send the others afterwards",
                retry_after_s=left_s,
            )
