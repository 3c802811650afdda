"""The names that clients give their requests, and the sequences of each with the key that asked, so
that they can be aborted by that name.
"""

from __future__ import annotations

from collections.abc import Iterable

from tlt_server.frontend.http.keys import Caller


def repeated(names: Iterable[str]) -> str | None:
    """Return the first name that comes a second time, or None."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


class Named:
    """Open sequences by name. A name that is used twice means all sequences that have it."""

    def __init__(self) -> None:
        self._owners: dict[str, dict[str, str]] = {}  # name -> sequence -> name of the key

    def open(self, name: str, ids: Iterable[str], owner: str) -> None:
        self._owners.setdefault(name, {}).update(dict.fromkeys(ids, owner))

    def close(self, name: str, ids: Iterable[str]) -> None:
        left = self._owners.get(name, {})
        for id in ids:
            left.pop(id, None)
        if not left:
            self._owners.pop(name, None)

    def find(self, names: Iterable[str], caller: Caller) -> list[str]:
        """Return the ids, each once, of all sequences with one of these names that the caller may
        end. Unknown names are treated as finished.
        """
        return [
            *dict.fromkeys(
                id
                for name in names
                for id, owner in self._owners.get(name, {}).items()
                if caller.sees(owner)
            )
        ]

    def __len__(self) -> int:
        return len(self._owners)
