"""One push as the transaction keeps it from its first manifest to its end: how it stands, and what
it knows of what has come.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Literal

from tlt_client.channels import owner
from tlt_server.errors import TltError
from tlt_server.records import Manifest
from tlt_server.weights.parts import Changed
from tlt_server.weights.staging import Staging

State = Literal["waiting", "staging", "gathering", "staged", "unchanged", "failed"]


@dataclass
class Push:
    """A push on its way. The thread writes `phases`, then `parts`, `incomplete` or `error`; the
    loop reads them once it has ended.
    """

    manifest: Manifest  # the last one, where it comes by parts
    first: tuple[str, str] | None = (
        None  # role and tensor that it began with, where it comes by parts
    )
    thread: threading.Thread | None = None
    staging: Staging | None = None
    phases: dict[str, float] = field(default_factory=dict)
    phase: str = ""
    since: float = 0.0
    parts: Changed | None = None
    incomplete: bool = False  # what came is in order, and more is to come
    error: TltError | None = None
    state: State = "waiting"  # for `start`
    aborted: bool = False
    gap: str = ""  # why something of it is missing for good, learnt while another part was staged
    out_of_step: bool = False  # its group brings something else, too, that nobody takes
    asked: list[str] = field(default_factory=list)  # ids of the commands that it answers
    trails: bool = False  # brings only what the version just committed had no need of
    due: bool = False  # staged, and a commit was asked for
    overwritten: set[str] = field(
        default_factory=set
    )  # in place: roles of which live values have changed
    staged_at: float = 0.0

    @property
    def version(self) -> str:
        return self.parts.version if self.parts else self.manifest.version

    @property
    def missing(self) -> str:
        """The tensors without which a push that is gathering does not end."""
        names = self.staging.missing if self.staging is not None else []
        return f"{len(names)} tensors are missing, among them {', '.join(map(repr, names[:3]))}"

    @property
    def unread(self) -> bool:
        """Whether, once its thread has ended, bytes stay in its group that the next push would take
        for its own. Of a push that comes by parts some may be on their way when another one has
        failed.
        """
        if not self.manifest.group:
            return False
        untouched = self.staging is None or self.staging.opened is not self.manifest
        return untouched or self.out_of_step or (self.manifest.partial and self.state == "failed")

    @property
    def spoiled(self) -> str:
        """For messages of its failure."""
        return (
            "; it had begun to write over the weights in use (--weight-staging none), so nothing is generated until a push succeeds"
            if self.overwritten
            else ""
        )

    @property
    def takes_more(self) -> bool:
        """Whether a further part is taken now."""
        complete = self.manifest.commit or self.due
        return self.manifest.partial and (
            self.state == "gathering" or (self.state == "staged" and not complete)
        )

    def goes_on_with(self, manifest: Manifest) -> bool:
        """Whether the manifest brings more of this push; else it begins another."""
        mine = self.manifest
        same = (mine.session, mine.version, mine.in_flight, mine.commit) == (
            manifest.session,
            manifest.version,
            manifest.in_flight,
            manifest.commit,
        )
        return same and self.staging is not None and not self.staging.has(manifest)


def first_of(part: Manifest) -> tuple[str, str]:
    """Role and name of its first tensor."""
    assert part.tensors, "a part names its tensors"
    return owner(part.tensors[0].name, part.role)
