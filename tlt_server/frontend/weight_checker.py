"""Checksums of everything live, computed anew, and what they are compared with: a baseline, or what was remembered."""

from __future__ import annotations

from tlt_server.errors import InvalidRequest
from tlt_server.frontend.weight_session import WeightSession


class WeightChecker:
    def __init__(self, session: WeightSession) -> None:
        self._session = session
        self._remembered: dict[str, str] = {}

    async def sums(self) -> dict[str, str]:
        return (await self._session.look(checksums=True)).checksums

    async def remember(self) -> dict[str, str]:
        self._remembered = await self.sums()
        return self._remembered

    async def mismatches(self, baseline: dict[str, str] | None) -> list[str]:
        """Names whose sums differ from the baseline, or from those remembered."""
        expected = baseline or self._remembered
        if not expected:
            raise InvalidRequest("there is nothing to compare with; give baseline as an object of checksums, or call with action reset "
                                 "first")
        sums = await self.sums()
        return sorted(name for name in sums.keys() | expected.keys() if sums.get(name) != expected.get(name))
