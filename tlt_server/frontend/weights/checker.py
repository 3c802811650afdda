"""Checksums of all live weights, computed at each call, and their comparison with a baseline or
with remembered checksums. A reset writes nothing: a push is complete or nothing, so the tensors
pushed since are known.

Two dialects call this, both with `CheckFields`, and share the remembered checksums; only their
replies differ.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal, NamedTuple

from msgspec import Meta

from tlt_client.channels import DRAFTER_PREFIX
from tlt_server.errors import InvalidRequest
from tlt_server.frontend.http.fields import Tolerant
from tlt_server.frontend.weights.broadcasts import MAX_TENSORS
from tlt_server.frontend.weights.session import WeightSession


class CheckFields(Tolerant, frozen=True, kw_only=True):
    action: Annotated[
        Literal["checksum", "reset", "reset_tensors", "snapshot", "compare"],
        "snapshot, reset: remember the checksums for compare; reset, reset_tensors: every tensor "
        "differs until it is pushed again",
    ] = "checksum"
    baseline: Annotated[
        Annotated[dict[str, str], Meta(max_length=MAX_TENSORS)] | None,
        "for compare; without it, what was remembered",
    ] = None

    @property
    def resets(self) -> bool:
        return self.action in ("reset", "reset_tensors")


class Checked(NamedTuple):
    """The checksums, or the mismatches of a comparison; the other one is None."""

    checksums: dict[str, str] | None
    mismatches: list[str] | None


class WeightChecker:
    def __init__(self, session: WeightSession) -> None:
        self._session = session
        self._remembered: dict[str, str] = {}
        self._reset: dict[str, int] = {}  # role -> pushes of it before it was reset

    async def check(self, asked: CheckFields) -> Checked:
        if asked.action == "compare":
            return Checked(None, await self._mismatches(asked.baseline))
        sums = await self._sums()
        if asked.action in ("reset", "snapshot"):
            self._remembered = sums
        if asked.resets:
            self._reset = {**self._session.arrivals}
        return Checked(sums, None)

    async def _sums(self) -> dict[str, str]:
        """Return the checksums; `reset` for a tensor that was reset and not pushed since."""
        sums = (await self._session.look(checksums=True)).checksums
        missing = {
            role for role, count in self._reset.items() if count == self._session.arrivals[role]
        }
        return {
            name: "reset"
            if ("drafter" if name.startswith(DRAFTER_PREFIX) else "target") in missing
            else value
            for name, value in sums.items()
        }

    async def _mismatches(self, baseline: dict[str, str] | None) -> list[str]:
        """Return the names whose checksums differ from the baseline, or from the remembered
        ones.
        """
        expected = self._remembered if baseline is None else baseline
        if not expected:
            raise InvalidRequest(
                "there is nothing to compare with; give baseline as an object of checksums, or "
                "call with action snapshot first"
            )
        sums = await self._sums()
        return await asyncio.to_thread(_differing, sums, expected)


def _differing(sums: dict[str, str], expected: dict[str, str]) -> list[str]:
    names = sums.keys() | expected.keys()
    return sorted(name for name in names if sums.get(name) != expected.get(name))
