"""Two networks change places: graphs hold the addresses of one of them, so it is their values that move."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Stored(Protocol):
    def storage(self) -> list[Tensor]:
        """Everything that makes a version, in a fixed order."""


def exchange(resident: Stored, other: Stored) -> None:
    """`other` takes over the storage that graphs know, with its own values in it; `resident` keeps its values in the other storage."""
    if resident is other:
        return  # written in place
    for mine, theirs in zip(resident.storage(), other.storage(), strict=True):
        kept = mine.clone()
        mine.copy_(theirs)
        theirs.copy_(kept)
    resident.__dict__, other.__dict__ = other.__dict__, resident.__dict__
