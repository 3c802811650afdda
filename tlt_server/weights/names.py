"""The content that each version's name stands for, so that a retry is told from a mistake: a name
means one content for ever. A label may be given to other content, which then gets a name of its
own.
"""

from __future__ import annotations

from collections import ChainMap, OrderedDict
from collections.abc import Iterable

from tlt_server.errors import Conflict
from tlt_server.labels import apart
from tlt_server.weights.checksums import digest
from tlt_server.weights.parts import Changed, Live, Part

REMEMBERED = 2**14


class Names:
    """Names of the live and the previous versions, for as long as they are kept, and of the last
    versions that were live.
    """

    def __init__(self) -> None:
        self._digests: OrderedDict[tuple[str, str], str] = (
            OrderedDict()
        )  # (role, version) -> content
        self._forgotten = False  # a name that is not remembered may have had content

    def check(self, parts: Changed, *kept: Live | Changed) -> None:
        """`Conflict` when a version's name belongs to other content, of those remembered or of
        `kept`.
        """
        known_by = ChainMap(_in_use(kept), self._digests)
        for role, part in parts.by_role.items():
            known = known_by.get((role, part.version))
            if known is not None and known != part.digest:
                raise Conflict(
                    f"version {part.version!r} of the {role} was pushed before with other content "
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
            known = known_by.get((role, part.version), unknown)
            if known is not None and known != part.digest:
                return parts.named(apart(part.version, digest(parts.sums)))
        return parts

    def add(self, role: str, part: Part) -> None:
        self._digests.setdefault((role, part.version), part.digest)
        while len(self._digests) > REMEMBERED:
            self._digests.popitem(last=False)
            self._forgotten = True


def _in_use(kept: Iterable[Live | Changed]) -> dict[tuple[str, str], str]:
    return {
        (role, part.version): part.digest
        for held in kept
        for role, part in held.by_role.items()
        if part.sums
    }
