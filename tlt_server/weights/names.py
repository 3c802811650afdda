"""The content that each version's name stands for, so that a retry is told from a mistake: a name
means one content for ever.
"""

from __future__ import annotations

from collections import OrderedDict

from tlt_server.errors import Conflict
from tlt_server.weights.parts import Changed, Drafter, Live, Target

REMEMBERED = 1024


class Names:
    """Names of the live and the previous versions, for as long as they are kept, and of the last
    versions that were live.
    """

    def __init__(self) -> None:
        self._digests: OrderedDict[tuple[str, str], str] = (
            OrderedDict()
        )  # (role, version) -> content

    def check(self, parts: Changed, *kept: Live | Changed) -> None:
        """`Conflict` when a version's name belongs to other content, of those remembered or of
        `kept`.
        """
        in_use = {
            (role, part.version): part.digest
            for held in kept
            for role, part in held.by_role.items()
            if part.sums
        }
        for role, part in parts.by_role.items():
            known = in_use.get((role, part.version), self._digests.get((role, part.version)))
            if known is not None and known != part.digest:
                raise Conflict(
                    f"version {part.version!r} of the {role} was pushed before with other content "
                    f"(digest {known[:12]}, now {part.digest[:12]}); give changed weights a new "
                    "version"
                )

    def add(self, role: str, part: Target | Drafter) -> None:
        self._digests.setdefault((role, part.version), part.digest)
        while len(self._digests) > REMEMBERED:
            self._digests.popitem(last=False)
