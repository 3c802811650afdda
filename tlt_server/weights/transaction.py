"""One push at a time: accept it, stage and verify it in a thread, commit it between two steps.

Owned by the engine's loop, whose thread calls everything here; what runs in the staging thread is
`Staging`. Until `commit` every failure leaves the live weights alone (`versions.py`). A push
that repeats a version with the same bits is a success that changes nothing.

Where weights are staged in place (`Storage.in_place`) there is no copy: the owner of the
transaction keeps the loop from stepping between `start` and the end of the push, and a push that
fails after its first write quarantines its roles until the next commit.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from tlt_client.channels import owner
from tlt_server.errors import (
    ChannelBroken,
    Conflict,
    EngineFailed,
    Forbidden,
    InvalidRequest,
    NotFound,
    TltError,
    Unavailable,
)
from tlt_server.weights.arriving import TIED_HEAD
from tlt_server.weights.candidate import Candidate
from tlt_server.weights.parts import Changed, Live, Target
from tlt_server.weights.spool import Cleanup
from tlt_server.weights.staging import Staging
from tlt_server.weights.storage import Options
from tlt_server.weights.update import Gathering, Push, Series, Staged, Unchanged, Waiting
from tlt_server.weights.versions import Versions
from tlt_server.wire.commands import Manifest


class Transaction:
    def __init__(
        self,
        live: Live,
        options: Options,
        on_phase: Callable[[str], None] = lambda phase: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`on_phase` is called in the staging thread."""
        self.options, self.on_phase, self._clock = options, on_phase, clock
        self.cleanup = Cleanup(options.spool)
        self.versions = Versions(live, options.spool, self.cleanup)
        self.push: Push | None = None
        self._series = Series()

    # -- parts arrive ------------------------------------------------------------------------------

    def begin(self, manifest: Manifest) -> Push:
        """Return the push that the manifest begins, goes on with, or repeats while it is on its
        way. `Forbidden` where the channel is closed, `Conflict` during another push. After any
        error the caller calls `refuse`.
        """
        self._check_open(manifest)
        live = self.versions.live.target.version
        if manifest.of not in ("", live):
            raise Conflict(
                f"the drafter was trained for version {manifest.of!r} of the target, and {live!r} "
                "is live; train it for that one"
            )
        headless = self._headless(manifest)
        if manifest.partial and headless is None and (push := self._gathering(manifest)):
            push.manifest, push.state = manifest, Waiting()
            return push
        if manifest.role == "adapter":
            self.options.check_slot(manifest.adapter, self.versions.live.adapters)
        if self.push is not None:
            if self.push.manifest == manifest and not (manifest.partial or self.push.ending):
                return self.push
            raise Conflict(
                f"{self.push.title} is being pushed; wait for it or abort it, then push again"
            )
        self.push = Push(manifest, manifest, Candidate(self.options, headless))
        if self.versions.repeats(manifest):
            self.push.state = Unchanged(self.versions.live.only(manifest.roles))
        return self.push

    def _check_open(self, manifest: Manifest) -> None:
        channels = self.options.channels
        if manifest.channel not in channels:
            missing = (
                "--weight-root DIR, the directory that pushes may come from"
                if manifest.channel == "disk"
                else f"{manifest.channel} among its --weight-channels"
            )
            raise Forbidden(
                f"this server takes no weights by {manifest.channel} "
                f"(open: {', '.join(channels) or 'no channel'}): it was started without {missing}"
            )
        if self.options.storage.in_place and not manifest.commit:
            raise InvalidRequest(
                "commit is false, but with --weight-staging none nothing can be staged next to the "
                "weights in use; push with commit true"
            )

    def _gathering(self, part: Manifest) -> Push | None:
        """Return the push that the part goes on with. If it begins another, close the one there is:
        its sender, or another one, has begun again.
        """
        push = self.push if self.push is not None and self.push.takes_more else None
        goes_on = self._series.admit(part, push)
        if push is not None and not goes_on:
            self.close()
        return push if goes_on else None

    def _headless(self, part: Manifest) -> Target | None:
        """Return the live target that the part completes: the part brings only the head that the
        target ties to its embedding, and its sender's push was committed without it.
        """
        versions = self.versions
        late = (
            self.push is None
            and part.partial
            and versions.live.target.network.config.tied_embeddings
            and not versions.quarantined
            and versions.last is not None
            and {owner(tensor.name, part.role) for tensor in part.tensors}
            == {("target", TIED_HEAD)}
            and self._series.follows(part, versions.last)
        )
        return versions.live.target if late else None

    def refuse(self, manifest: Manifest) -> None:
        """Note that a part was refused before anything of it was taken: what it belongs to will not
        be complete, and its bytes stay in its group.
        """
        if manifest.partial:
            self._series.note(manifest)
            if self.push is not None and self._series.both(self.push.manifest, manifest):
                self.push.give_up(f"tensor {manifest.tensors[0].name!r} of it was refused")
        if manifest.group:
            self.skip(manifest.group)

    # -- groups ------------------------------------------------------------------------------------

    def brings(self, group: str) -> bool:
        """Return True if a push takes, or is about to take, what comes through this group."""
        push = self.push
        return push is not None and push.manifest.group == group and push.brings_bytes

    def skip(self, group: str) -> None:
        """Leave a group that brings bytes which nothing takes, before they pass for another push:
        now, or once it has brought the push that it brings.
        """
        push = self.push
        if push is not None and self.brings(group):
            push.out_of_step = True
        else:
            self.leave(group)

    def leave(self, group: str) -> None:
        """Leave a group: what it has brought of a push without a version, or with a label, will not
        be completed, and a trainer that joins it again begins a push.
        """
        self.options.intake.groups.leave(group)
        self._series.forget(group)
        push = self.push
        if (
            push is not None
            and push.takes_more
            and push.manifest.group == group
            and not push.manifest.session
            and (push.manifest.labelled or not push.version)
        ):
            push.give_up(f"group {group!r} was left or joined again")

    # -- the states of a push ----------------------------------------------------------------------

    def start(self) -> None:
        """Stage the push that waits, in a thread."""
        push = self.push
        assert push is not None and isinstance(push.state, Waiting)
        self.cleanup.run()
        try:
            push.state = Staging(
                push,
                self.versions,
                self.options,
                self.cleanup.ends(),
                lambda phase: self.on_phase(phase),
                self._clock,
            )
        except Unavailable as error:
            push.fail(error)

    def poll(self) -> Push | None:
        """Return the push once its thread has ended, until it is closed; one that is gathering:
        once. Leave its group if bytes stay there.
        """
        push = self.push
        if push is None:
            return None
        out_of_step = False
        match push.state:
            case Waiting():
                return None
            case Staging() as staging:
                if not staging.ended:
                    return None
                out_of_step, push.out_of_step = push.out_of_step, False
                self._judge(push, staging.outcome)
            case Gathering(since_s):
                timeout_s = self.options.intake.timeout_s
                if self._clock() - since_s < timeout_s:
                    return None
                push.fail(
                    ChannelBroken(
                        f"of {push.title} nothing came for {timeout_s:g} s and "
                        f"{push.missing}; push all of them again"
                    )
                )
        if push.manifest.group and (out_of_step or push.leaves_bytes):
            self.leave(push.manifest.group)
        return push

    def _judge(self, push: Push, outcome: Changed | TltError | None) -> None:
        """Set the state that follows from how the thread ended. `EngineFailed` ends the engine."""
        if isinstance(outcome, EngineFailed):
            raise outcome  # not of the push: a rank is lost
        if push.candidate.stopped:
            push.fail(push.aborted())
        elif isinstance(outcome, TltError):
            push.fail(outcome)
        elif push.gap:
            push.fail(push.incomplete(push.gap))
        elif outcome is None:
            push.state = Gathering(self._clock())
        elif self.versions.has(outcome):
            push.state = Unchanged(outcome)
        else:
            push.state = Staged(outcome, self._clock())

    def abort(self, version: str = "", session: str = "") -> Push:
        """Ask the push of this version or session to end, or any; `poll` returns it as failed."""
        push = self._named(version, session)
        push.abort()
        return push

    def close(self) -> None:
        """Drop the push that failed, is unchanged or was aborted. One that has written over live
        weights quarantines them.
        """
        push, self.push = self.push, None
        if push is None:
            return
        match push.state:
            case Unchanged(changed):
                if changed.adapter is None:
                    self.versions.note(push.version, changed.by_role)
            case state:
                if not isinstance(state, Waiting):
                    self.versions.forget(push.version)
                if push.candidate.overwritten:
                    self.versions.quarantine(push.candidate.overwritten, push.version)
        self.cleanup.drop(push.candidate.release())
        if self.options.spool is not None:
            self.cleanup.discard(self.options.spool.discarded())

    # -- commit ------------------------------------------------------------------------------------

    def ready_to_commit(self, version: str, session: str = "") -> tuple[Push, Staged] | None:
        """Return the push and its state. None where no push of this version is on its way and the
        last one is what is live: a commit may be asked for again.
        """
        push = self.push
        if self.versions.made(version) and (push is None or push.version != version):
            return None
        push = self._named(version, session)
        match push.state:
            case Staged() as staged:
                return push, staged
            case Gathering():
                raise Conflict(
                    f"{push.title} is not complete: {push.missing}; push them, then commit"
                )
        raise Conflict(
            f"{push.title} is not staged yet ({push.state.name}); wait for the push to be "
            "answered, then commit"
        )

    def name_staged(self, staged: Staged, version: str) -> Staged:
        """Return the state with the name that a label means for its content."""
        changed = self.versions.named(staged.changed.named(version), labelled=True)
        self.versions.record(changed, self.versions.live.updated(changed))
        return replace(staged, changed=changed)

    def commit(self, push: Push, staged: Staged) -> Live:
        """Make the staged weights live. The caller installs the result before the next step."""
        in_place = self.options.storage.in_place
        if staged.changed.adapter is not None:
            live = self.versions.load(staged.changed.adapter)
        else:
            live = self.versions.commit(staged.changed, push.manifest, in_place=in_place)
        self.push = None
        return live

    def check_none(self, then: str) -> None:
        """`Conflict` during a push."""
        if self.push is not None:
            raise Conflict(
                f"{self.push.title} is being pushed; wait for it or abort it, then {then}"
            )

    def _named(self, version: str, session: str) -> Push:
        """Return the push if it is of this version and session; empty: of any."""
        push = self.push
        if (
            push is None
            or version not in ("", push.version)
            or session not in ("", push.manifest.session)
        ):
            of = f"of version {version!r} " if version else ""
            of = of or ("of this weight update " if session else "")
            raise NotFound(f"there is no push {of}on its way; GET /weights says what there is")
        return push
