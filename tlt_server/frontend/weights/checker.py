"""Checksums of everything live, computed anew, and what they are compared with: a baseline, or what
was remembered.

Two dialects ask for this, by `CheckFields` both, and share what is remembered; only their replies
differ.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from pydantic import Field

from tlt_server.errors import InvalidRequest
from tlt_server.frontend.http.fields import NullIsAbsent
from tlt_server.frontend.weights.session import WeightSession


class CheckFields(NullIsAbsent):
    action: Literal["checksum", "reset", "snapshot", "compare"] = Field(
        "checksum",
        description="reset, or snapshot, which is the same: remember the checksums for compare",
    )
    baseline: dict[str, str] | None = Field(
        None, description="for compare; without it, what reset remembered"
    )


class Checked(NamedTuple):
    """One of the two: what a comparison found is None where none was asked for."""

    checksums: dict[str, str] | None
    mismatches: list[str] | None


class WeightChecker:
    def __init__(self, session: WeightSession) -> None:
        self._session = session
        self._remembered: dict[str, str] = {}

    async def check(self, asked: CheckFields) -> Checked:
        if asked.action == "compare":
            return Checked(None, await self._mismatches(asked.baseline))
        sums = await self._sums()
        if asked.action != "checksum":
            self._remembered = sums
        return Checked(sums, None)

    async def _sums(self) -> dict[str, str]:
        return (await self._session.look(checksums=True)).checksums

    async def _mismatches(self, baseline: dict[str, str] | None) -> list[str]:
        """Names whose sums differ from the baseline, or from those remembered."""
        expected = self._remembered if baseline is None else baseline
        if not expected:
            raise InvalidRequest(
                "there is nothing to compare with; give baseline as an object of checksums, or call with action reset "
                "first"
            )
        sums = await self._sums()
        return sorted(
            name for name in sums.keys() | expected.keys() if sums.get(name) != expected.get(name)
        )
