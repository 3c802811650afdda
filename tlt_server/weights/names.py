"""The content that each version's name stands for, so that a retry is told from a mistake: a name
means one content for ever. A label may be given to other content, which then gets a name of its
own.
"""

from __future__ import annotations

from collections import ChainMap, OrderedDict
from collections.abc import Iterable

from tlt_server.errors import Conflict
from tlt_server.weights.checksums import digest
from tlt_server.weights.parts import Adapter, Changed, Live, Part
from tlt_server.wire.labels import apart

REMEMBERED = 2**14


class Names:
    """Names of the live and the previous versions, for as long as they are kept, and of the last
    versions that were live.
    """

    def __init__(self, started: Iterable[str] = ()) -> None:
        """`started`: the versions that the engine started with, of all roles."""
        self._started = frozenset(started)
        # (role, or the adapter; version) -> content
        self._digests: OrderedDict[tuple[str, str], str] = OrderedDict()
        self._forgotten = False  # a name that is not remembered may have had content

    def check(self, parts: Changed, *kept: Live | Changed) -> None:
        """`Conflict` when a version's name belongs to other content, of those remembered or of
        `kept`.
        """
        known_by = ChainMap(_in_use(kept), self._digests)
        for role, part in parts.by_role.items():
            known = known_by.get(_key(role, part))
            if known is not None and known != part.digest:
                of = f"adapter {part.name!r}" if isinstance(part, Adapter) else f"the {role}"
                raise Conflict(
                    f"version {part.version!r} of {of} was pushed before with other content "
                    f"(digest {known[:12]}, now {part.digest[:12]}); give changed weights a new "
                    "version"
                )

    def labelled(self, parts: Changed, *kept: Live | Changed) -> Changed:
        """Return the parts, whose version is a label, under a name that has no other content, as
        far as is remembered: the label, or the label with the digest.
        """
        known_by = ChainMap(_in_use(kept), self._digests)
        unknown = "" if self._forgotten else None
        for role, part in parts.by_role.items():
            known = known_by.get(_key(role, part), unknown)
            if known is not None and known != part.digest:
                content = part.digest if isinstance(part, Adapter) else digest(parts.sums)
                return parts.named(apart(part.version, content))
        return parts

    def may_have_been(self, role: str, version: str) -> bool:
        """Return True if the role may have had this version. Which roles had a version that the
        engine started with is not known.
        """
        return self._forgotten or version in self._started or (role, version) in self._digests

    def add(self, role: str, part: Part) -> None:
        self._digests.setdefault(_key(role, part), part.digest)
        while len(self._digests) > REMEMBERED:
            self._digests.popitem(last=False)
            self._forgotten = True


def _key(role: str, part: Part) -> tuple[str, str]:
    return f"{role} {part.name}" if isinstance(part, Adapter) else role, part.version


def _in_use(kept: Iterable[Live | Changed]) -> dict[tuple[str, str], str]:
    return {
        _key(role, part): part.digest for held in kept for role, part in held.parts if part.sums
    }
