"""Requests that may have killed the engine: running at two of its crashes, on trial and no further
the second time, one is refused.

Known by what it computes (prompt and sampling), not by its id or by a seed that the server chose.
One that ended elsewhere the second time was more likely a bystander, and one that completes is
cleared. Nobody is refused for the company of a killer: the engine client tries suspects one at a
time, each until it has gone a step, or, where it ended twice at the same place, past that place.
Only what was on trial at a crash, or ran alone, can be refused. Bounded, and forgotten after a
while.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from tlt_server.records import GenerateRequest

KEPT = 4096  # requests remembered
KEPT_S = 900.0  # after the last crash
UNHEARD = 16  # output tokens that may have died with the engine, so the same end can look earlier by these


@dataclass
class _Suspect:
    tokens: int  # output tokens it had at the last crash
    at_s: float
    again: bool  # at the crash before it was as far
    refused: bool


class Sorted(NamedTuple):
    """Requests by what is known of them, each in the order given."""

    free: list[GenerateRequest]
    suspect: list[GenerateRequest]
    refused: list[GenerateRequest]


class Suspects:
    def __init__(self) -> None:
        self._suspects: OrderedDict[bytes, _Suspect] = (
            OrderedDict()
        )  # by the time of the last crash

    def crashed(
        self,
        running: Iterable[tuple[GenerateRequest, int]],
        tried: GenerateRequest | None,
        now_s: float,
    ) -> None:
        """The engine died while these ran; each with the output tokens it had given. Choices of one
        request count as the furthest one. `tried` is the one on trial, or the only one.
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
        """Nothing is hashed while there are no suspects."""
        self._forget(now_s)
        if not self._suspects:
            return Sorted([*requests], [], [])
        kinds, keys = Sorted([], [], []), dict[tuple[int, int], bytes]()
        for request in requests:
            same = id(request.token_ids), id(request.sampling)  # of all choices of an item
            key = keys[same] = keys.get(same) or fingerprint(request)
            known = self._suspects.get(key)
            (
                kinds.free if known is None else kinds.refused if known.refused else kinds.suspect
            ).append(request)
        return kinds

    def trial(self, request: GenerateRequest) -> int:
        """How many output tokens its trial takes: it is over when the request has more of them."""
        known = self._suspects.get(fingerprint(request))
        return known.tokens if known is not None and known.again else 0

    def completed(self, request: GenerateRequest) -> None:
        if self._suspects:
            self._suspects.pop(fingerprint(request), None)

    def _forget(self, now_s: float) -> None:
        while self._suspects and now_s - next(iter(self._suspects.values())).at_s >= KEPT_S:
            self._suspects.popitem(last=False)


def fingerprint(request: GenerateRequest) -> bytes:
    return hashlib.sha256(msgspec.msgpack.encode((request.token_ids, request.sampling))).digest()
