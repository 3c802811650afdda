"""Keys that rest because their requests end the engine again and again. A death counts against a
key if only its requests ran, or one of them was on trial. After two such deaths within the restart
window new requests of the key are refused for a time that doubles with each further death. Keys
whose requests merely ran next to those are not affected.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from tlt_server.errors import Unavailable

DEATHS = 2  # within the window, before a key rests
FIRST_S, MAX_S = 15.0, 600.0
KEPT = 1024  # keys remembered


@dataclass
class _Blamed:
    last_s: float
    deaths: int = 1  # in a row, each within the window after the one before or after the rest
    until_s: float = 0.0  # the end of the rest


class Rests:
    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._blamed = OrderedDict[str, _Blamed]()  # by key, in order of the last death

    def died(self, owner: str, now_s: float) -> None:
        """Count a death that only requests of this key can have caused. Without keys `owner` is
        empty: callers cannot be told apart, so none rests.
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
        while len(self._blamed) > KEPT:
            self._blamed.popitem(last=False)

    def check(self, owner: str, now_s: float) -> None:
        """`Unavailable` while this key rests."""
        known = self._blamed.get(owner)
        if known is not None and now_s < known.until_s:
            left_s = known.until_s - now_s
            raise Unavailable(
                f"the engine died {known.deaths} times with requests of this key alone, so the key "
                f"rests for {left_s:.0f} s; find the request that does it (the server's log names "
                "what ran), leave it out, and send the others then",
                retry_after_s=left_s,
            )
