"""The seam between what is learnt of drafts and `knowledge`, which holds it per weight version: the
outlook of a drafter (`outlook`), and each table of survivals (`survival`, on a GPU
`engine.gpu.drafts.tables`).
"""

from __future__ import annotations

from typing import Protocol, TypeVar

DOUBT = 8  # divides the counts of what was learnt, as weights have changed

Record = TypeVar("Record")


class Learnt(Protocol[Record]):
    def record(self) -> Record: ...

    def check(self, record: Record) -> None:
        """`ValueError` unless it is of this form."""

    def restore(self, record: Record) -> None:
        """Take up what was learnt. The record has been checked."""

    def forget(self) -> None:
        """Doubt what was learnt, as weights have changed; what comes next counts for more."""
