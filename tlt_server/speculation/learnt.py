"""The seam between draft statistics and `knowledge`, which keeps them per weight version: a
drafter's acceptance estimate (`estimate`), and each table of acceptance probabilities
(`calibration`, on a GPU `engine.gpu.steps.drafts.tables`).
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
        """Discount past observations after a weight change; later ones weigh more."""
