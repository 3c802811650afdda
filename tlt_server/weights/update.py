"""One push from its first manifest to its end: its state, the tensors that have come, and the
thread that receives, checks and keeps them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

from tlt_client.channels import CHANNELS, TRAINED, Receiver, owner
from tlt_server.errors import Conflict, PushFailed, TltError
from tlt_server.process.threads import started
from tlt_server.registry import Registry
from tlt_server.weights.candidate import Candidate
from tlt_server.weights.options import Options
from tlt_server.weights.parts import Changed
from tlt_server.weights.spool import not_recorded
from tlt_server.weights.versions import Versions
from tlt_server.wire.commands import Manifest

# The trainer's own candidates come from a directory of the server.
RECEIVERS = Registry(
    "channel",
    {name: channel.receiver for name, channel in CHANNELS.items()}
    | {TRAINED: "tlt_client.channels.disk:TrainedReceiver"},
)
LOOK_S = 0.05  # between two looks whether a push that waits was aborted


@dataclass(frozen=True)
class Waiting:
    """The push was accepted; `Transaction.start` stages it."""

    name: ClassVar = "waiting"


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


@dataclass
class Push:
    """A push on its way. One that comes in parts has one manifest per part."""

    first: Manifest
    manifest: Manifest  # the newest
    candidate: Candidate
    state: Waiting | Staging | Gathering | Staged | Unchanged | FailedPush = Waiting()
    out_of_step: bool = False  # its group also brings a push that nothing takes
    gap: str = ""  # why a tensor of it is missing for good, while the thread works
    phases: dict[str, float] = field(default_factory=dict)  # seconds; also written by the thread
    asked: list[str] = field(default_factory=list)  # ids of the commands that its end answers

    @property
    def version(self) -> str:
        match self.state:
            case Staged(changed) | Unchanged(changed):
                return changed.version
        return self.manifest.version

    @property
    def title(self) -> str:
        """Return the version for messages."""
        return f"version {self.version!r}" if self.version else "a version without a name"

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
        return isinstance(self.state, FailedPush) or self.candidate.stopped

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

    def fail(self, error: TltError) -> None:
        consequence = (
            "; it had begun to write over the weights in use (--weight-staging none), so nothing "
            "is generated until a push succeeds"
            if self.candidate.overwritten
            else ""
        )
        self.state = FailedPush(type(error)(error.message + consequence))

    def give_up(self, why: str) -> None:
        """Fail, as it cannot become complete; if its thread works, once that has ended."""
        if isinstance(self.state, Staging):
            self.gap = why
        elif isinstance(self.state, Waiting) or self.takes_more:
            self.fail(self.incomplete(why))

    def incomplete(self, why: str) -> TltError:
        return Conflict(
            f"the push of {self.title} cannot become complete: {why}; push all of its tensors again"
        )

    def abort(self) -> None:
        """Fail now, or at the next phase of its thread, whose wait for a trainer ends."""
        if isinstance(self.state, Staging):
            self.candidate.stop()
        elif isinstance(self.state, Waiting | Gathering | Staged):
            self.fail(self.aborted())

    def aborted(self) -> TltError:
        return Conflict(f"the push of {self.title} was aborted; nothing has changed")

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


class _Aborted(Exception):
    """Raised at the next phase."""


class Staging:
    """The state of a push while its thread works. The thread writes `outcome`, which the loop reads
    after the end: complete weights under their name, an error, or None where more is to come.
    """

    name: ClassVar = "staging"

    def __init__(
        self,
        push: Push,
        versions: Versions,
        options: Options,
        freed: list[threading.Event],
        on_phase: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        """`freed`: set once dropped weights are freed. `on_phase` is called in the thread.
        `Unavailable` when the system gives no thread.
        """
        self.outcome: Changed | TltError | None = PushFailed(
            "the staging thread ended without a result; nothing has changed: push again"
        )
        self.phase = ""
        self._since_s = 0.0
        self._push, self._manifest = push, push.manifest
        self._versions, self._options, self._freed = versions, options, freed
        self._on_phase, self._clock = on_phase, clock
        self._thread = started("stage weights", self._run)

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        for freed in self._freed:
            while not (freed.wait(LOOK_S) or self._push.candidate.stopped):
                pass  # what was dropped may take the room that this part needs
        try:
            self.outcome = self._staged()
        except _Aborted:
            pass
        except TltError as error:
            # A new error: the frames of this one's traceback hold the network.
            self.outcome = type(error)(error.message)
        except OSError as error:
            self.outcome = not_recorded(error)
        except BaseException as error:  # the loop must learn of any
            self.outcome = PushFailed(
                f"staging broke off ({type(error).__name__}: {error}); nothing has changed: "
                "push again"
            )

    def _staged(self) -> Changed | None:
        spool, versions, manifest = self._options.spool, self._versions, self._manifest
        # An adapter is compared with no other weights, but recorded with them.
        unsummed = spool is None and manifest.role == "adapter"
        live = versions.live if unsummed else versions.completed()
        if spool is not None:
            spool.begin()
        changed = self._push.candidate.take(manifest, live, self._receiver, self._enter)
        if changed is not None:
            changed = versions.named(changed, labelled=manifest.labelled)
            if spool is not None:
                self._enter("spool")
                spool.prepare(changed, live.updated(changed))
        self._enter("done")
        return changed

    def _receiver(self, manifest: Manifest) -> Receiver:
        receiver: Receiver = RECEIVERS.resolve(manifest.channel)(manifest, self._options.intake)
        return receiver

    def _enter(self, phase: str) -> None:
        if self._push.candidate.stopped:
            raise _Aborted
        now_s, phases = self._clock(), self._push.phases
        if self.phase:
            phases[self.phase] = phases.get(self.phase, 0.0) + now_s - self._since_s
        self.phase, self._since_s = phase, now_s
        self._on_phase(phase)
