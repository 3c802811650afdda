"""Requests that may have crashed the engine. One is refused if it ran at two crashes, was on trial
or alone at the second, and had got no further in between.

A request is identified by its key and its computation (prompt and sampling), not by its id or by a
seed that the server chose; one with a structured output by its key and the form of its grammar,
whose numbers and names are easily others. After a crash suspects run one at a time: each until it
has completed a step or, where it was at the same place at both crashes, until it is past that
place. So no request is refused for running next to the one that crashes the engine. One that
completes is cleared. The number of suspects is bounded, and they are forgotten after a while.
"""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from tlt_server.wire.records import GenerateRequest

KEPT = 4096  # requests remembered
KEPT_S = 900.0  # after the last crash
# output tokens that may be lost with the engine, so the same place can look earlier by this many
UNHEARD = 16
WORDS = re.compile(r"[\w\s]+")  # numbers, names and spaces of a grammar


@dataclass
class _Suspect:
    tokens: int  # output tokens it had at the last crash
    at_s: float
    again: bool  # it was as far at the crash before
    refused: bool


class Sorted(NamedTuple):
    """Requests sorted by what is known of them, each list in the order given."""

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
        tokens. Choices of one request count as the furthest one. `tried` is the request on trial,
        or the only one.
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
        """Return the output tokens of a trial: it is over when the request has more of them."""
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
