"""Responses that later ones may continue, kept in memory and bounded in number and bytes.

To make room, the oldest response of the key with the most data is dropped.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from tlt_server.errors import NotFound
from tlt_server.frontend.http.keys import Caller


class KeptResponse(NamedTuple):
    id: str
    owner: str  # name of the key
    messages: bytes  # the conversation with this answer, without instructions, in MessagePack
    body: bytes  # the reply

    @property
    def size(self) -> int:
        return len(self.messages) + len(self.body)


class ResponseShelf:
    def __init__(self, most: int, most_bytes: int) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._kept: dict[str, KeptResponse] = {}  # in order of creation
        self._bytes: Counter[str] = Counter()  # by owner

    def keep(self, response: KeptResponse) -> bool:
        """Keep a response. Return False if there is no room."""
        self._kept[response.id] = response
        self._bytes[response.owner] += response.size
        while len(self._kept) > self._most or self._bytes.total() > self._most_bytes:
            greediest = max(self._bytes, key=self._bytes.__getitem__)
            self._forget(next(each for each in self._kept.values() if each.owner == greediest))
        return response.id in self._kept

    def find(self, id: str, caller: Caller) -> KeptResponse:
        """Return a response of the caller. `NotFound` if there is none, or no longer."""
        found = self._kept.get(id)
        if found is None or not caller.sees(found.owner):
            raise NotFound(
                f"there is no response {id[:100]!r}; the newest {self._most} are kept "
                "(max_responses, max_responses_mb) until the server ends, unless store is false: "
                "send the whole conversation"
            )
        return found

    def delete(self, id: str, caller: Caller) -> None:
        self._forget(self.find(id, caller))

    def _forget(self, response: KeptResponse) -> None:
        del self._kept[response.id]
        self._bytes[response.owner] -= response.size
        if not self._bytes[response.owner]:
            del self._bytes[response.owner]

    def check(self) -> None:
        """Assert that the counts are correct and within the bounds."""
        sizes: Counter[str] = Counter()
        for response in self._kept.values():
            sizes[response.owner] += response.size
        assert sizes == self._bytes
        assert len(self._kept) <= self._most and sizes.total() <= self._most_bytes
