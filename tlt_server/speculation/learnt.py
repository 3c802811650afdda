"""The seam between draft statistics and `knowledge`, which keeps them per weight version: the
acceptance estimate of a drafter (`estimate`), and each table of acceptance probabilities
(`survival`, on a GPU `engine.gpu.drafts.tables`).
"""

from __future__ import annotations

from typing import Protocol, TypeVar

DOUBT = 8  # divides the counts of what was learnt, as weights have changed

Record = TypeVar("Record")


class Learnt(Protocol[Record]):
    def record(self) -> Record: ...

    def check(self, record: Record) -> None:
        """Raise `ValueError` unless the record has this object's form."""

    def restore(self, record: Record) -> None:
        """Load a record that `check` has accepted."""

    def forget(self) -> None:
        """Discount past observations after a weight change; later ones count for more."""
