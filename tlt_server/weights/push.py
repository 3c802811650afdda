"""One push from its first manifest to its end: the state it is in, and what has come of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from tlt_client.channels import owner
from tlt_server.commands import Manifest
from tlt_server.errors import TltError
from tlt_server.weights.candidate import Candidate
from tlt_server.weights.parts import Changed
from tlt_server.weights.staging import Staging


@dataclass
class Waiting:
    """The push was accepted; `Transaction.start` stages it."""

    name: ClassVar = "waiting"
    out_of_step: bool = False  # its group also brings a push that nothing takes


@dataclass(frozen=True)
class Gathering:
    """The parts that have come are in order, and more are to come."""

    name: ClassVar = "gathering"
    since_s: float


@dataclass(frozen=True)
class Staged:
    """The push is complete and verified."""

    name: ClassVar = "staged"
    changed: Changed
    since_s: float
    due: bool = False  # a commit was asked for


@dataclass(frozen=True)
class Unchanged:
    """The weights are live under their version already."""

    name: ClassVar = "unchanged"
    changed: Changed


@dataclass(frozen=True)
class FailedPush:
    """The push ends with an error."""

    name: ClassVar = "failed"
    error: TltError
    version: str


State = Waiting | Staging | Gathering | Staged | Unchanged | FailedPush


@dataclass
class Push:
    """A push on its way. One that comes in parts has one manifest per part."""

    first: Manifest
    manifest: Manifest  # the newest
    candidate: Candidate
    state: State = field(default_factory=Waiting)
    phases: dict[str, float] = field(default_factory=dict)  # seconds; also written by the thread
    asked: list[str] = field(default_factory=list)  # ids of the commands that its end answers

    @property
    def version(self) -> str:
        match self.state:
            case Staged(changed) | Unchanged(changed):
                return changed.version
            case FailedPush(_, version):
                return version
        return self.manifest.version

    @property
    def title(self) -> str:
        return titled(self.version)

    @property
    def missing(self) -> str:
        """The tensors that a gathering push lacks, for messages."""
        names = self.candidate.missing
        return f"{len(names)} tensors are missing, among them {', '.join(map(repr, names[:3]))}"

    @property
    def to_commit(self) -> bool:
        """Return True if it is committed once it is staged."""
        return self.manifest.commit or (isinstance(self.state, Staged) and self.state.due)

    @property
    def takes_more(self) -> bool:
        """Return True if a further part is taken now."""
        open_ = isinstance(self.state, Gathering) or (
            isinstance(self.state, Staged) and not self.to_commit
        )
        return self.manifest.partial and open_

    @property
    def ending(self) -> bool:
        """Return True if it has failed or was aborted."""
        match self.state:
            case FailedPush():
                return True
            case Staging() as staging:
                return staging.aborted
        return False

    @property
    def brings_bytes(self) -> bool:
        """Return True if bytes for it are, or will soon be, taken from its group."""
        return isinstance(self.state, Waiting | Staging)

    @property
    def leaves_bytes(self) -> bool:
        """Return True if bytes stay in its group, after its thread has ended, that the next push
        would take for its own. When one part has failed, others may be on their way.
        """
        failed_part = self.manifest.partial and isinstance(self.state, FailedPush)
        return self.candidate.opened is not self.manifest or failed_part

    @property
    def consequence(self) -> str:
        """The effect of its failure on the weights in use, for messages."""
        if not self.candidate.overwritten:
            return ""
        return (
            "; it had begun to write over the weights in use (--weight-staging none), so nothing "
            "is generated until a push succeeds"
        )

    def goes_on_with(self, manifest: Manifest) -> bool:
        """Return True if the manifest brings more of this push; otherwise it begins another."""
        mine = self.manifest
        same = (mine.session, mine.version, mine.labelled, mine.in_flight, mine.commit) == (
            manifest.session,
            manifest.version,
            manifest.labelled,
            manifest.in_flight,
            manifest.commit,
        )
        return same and not self.candidate.has(manifest)


def first_tensor(part: Manifest) -> tuple[str, str]:
    """Return role and name of the first tensor that a part names."""
    assert part.tensors, "a part names its tensors"
    return owner(part.tensors[0].name, part.role)


def titled(version: str) -> str:
    """Return a push's version for messages."""
    return repr(version or "without a name")
