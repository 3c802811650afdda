"""Which sequences belong to the name that a client gave its request, so that it can be aborted by that name."""

from __future__ import annotations

from collections.abc import Iterable


class Named:
    """Names may be in use twice; then they mean all that has them."""

    def __init__(self) -> None:
        self._ids: dict[str, list[str]] = {}

    def open(self, name: str, ids: Iterable[str]) -> None:
        self._ids.setdefault(name, []).extend(ids)

    def close(self, name: str, ids: Iterable[str]) -> None:
        ended = set(ids)
        left = [id for id in self._ids.pop(name, []) if id not in ended]
        if left:
            self._ids[name] = left

    def find(self, names: Iterable[str]) -> list[str]:
        """Ids of all sequences with one of these names; unknown ones have ended already."""
        return [id for name in names for id in self._ids.get(name, ())]

    def __len__(self) -> int:
        return len(self._ids)
