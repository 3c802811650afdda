"""Checksums of all live weights, computed at each call, and their comparison with a baseline or
with remembered checksums.

Two dialects call this, both with `CheckFields`, and share what is remembered; only their replies
differ.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal, NamedTuple

from msgspec import Meta

from tlt_server.errors import InvalidRequest
from tlt_server.frontend.http.fields import Tolerant
from tlt_server.frontend.weights.broadcasts import MAX_TENSORS
from tlt_server.frontend.weights.session import WeightSession


class CheckFields(Tolerant, frozen=True, kw_only=True):
    action: Annotated[
        Literal["checksum", "reset", "snapshot", "compare"],
        Meta(
            description="reset, or snapshot, which is the same: remember the checksums for compare"
        ),
    ] = "checksum"
    baseline: Annotated[
        Annotated[dict[str, str], Meta(max_length=MAX_TENSORS)] | None,
        Meta(description="for compare; without it, what reset remembered"),
    ] = None


class Checked(NamedTuple):
    """The checksums, or the mismatches that a comparison found; the other one is None."""

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
        """Return the names whose checksums differ from the baseline, or from those remembered."""
        expected = self._remembered if baseline is None else baseline
        if not expected:
            raise InvalidRequest(
                "there is nothing to compare with; give baseline as an object of checksums, or "
                "call with action reset first"
            )
        sums = await self._sums()
        return await asyncio.to_thread(_differing, sums, expected)


def _differing(sums: dict[str, str], expected: dict[str, str]) -> list[str]:
    names = sums.keys() | expected.keys()
    return sorted(name for name in names if sums.get(name) != expected.get(name))
