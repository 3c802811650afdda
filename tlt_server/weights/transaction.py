"""One push at a time: accept it, stage and verify it in a thread, commit it between two steps.

Owned by the engine's loop, whose thread makes all calls here; the staging thread runs `Staging`.
Until `commit` every failure leaves the live weights unchanged (`versions.py`). A push that repeats
a version with the same bits succeeds and changes nothing.

With staging in place (`Storage.in_place`) there is no copy: the owner of the transaction keeps the
loop from stepping between `start` and the end of the push, and a push that fails after its first
write quarantines its roles until the next commit.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from tlt_client.channels import PEER, owner
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
        """Return the push that the manifest begins, continues, or repeats while it is in progress.
        `Forbidden` if the channel is closed, `Conflict` during another push. After any error the
        caller calls `refuse`.
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
            missing = {
                "disk": "--weight-root DIR, the directory that pushes may come from",
                PEER: "--link-port, --state-dir, or another channel in --weight-channels",
            }.get(manifest.channel, f"{manifest.channel} among its --weight-channels")
            raise Forbidden(
                f"this server takes no weights by {manifest.channel} "
                f"(open: {', '.join(channels) or 'no channel'}): it was started without {missing}"
            )
        if self.options.storage.in_place and not manifest.commit:
            raise InvalidRequest(
                "commit is false, but with --weight-staging none nothing can be staged; push with "
                "commit true"
            )

    def _gathering(self, part: Manifest) -> Push | None:
        """Return the push that the part continues. A part that begins another push closes the
        current one: some sender has started over.
        """
        push = self.push if self.push is not None and self.push.takes_more else None
        goes_on = self._series.admit(part, push)
        if push is not None and not goes_on:
            self.close()
        return push if goes_on else None

    def _headless(self, part: Manifest) -> Target | None:
        """Return the live target that the part completes: the part contains only the tied head, and
        the sender's previous push committed the target without it.
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
        """Record that a part was rejected before any of it was read. Its push cannot become
        complete, and its bytes remain in its group.
        """
        if manifest.partial:
            self._series.note(manifest)
            if self.push is not None and self._series.both(self.push.manifest, manifest):
                self.push.give_up(f"tensor {manifest.tensors[0].name!r} of it was refused")
        if manifest.group:
            self.skip(manifest.group)

    # -- groups ------------------------------------------------------------------------------------

    def brings(self, group: str) -> bool:
        """Return True if a push reads, or will read, from this group."""
        push = self.push
        return push is not None and push.manifest.group == group and push.brings_bytes

    def skip(self, group: str) -> None:
        """Leave a group whose next bytes belong to no push, so that no later push reads them. If a
        push is still reading from the group, leave after that.
        """
        push = self.push
        if push is not None and self.brings(group):
            push.out_of_step = True
        else:
            self.leave(group)

    def leave(self, group: str) -> None:
        """Leave a group. A gathering push from it without a version, or with a label, fails; a
        trainer that joins the group again begins a new push.
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
        """Stage the waiting push in a thread."""
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
        """Return the push after its thread has ended, on each call until it is closed; return a
        gathering push only once. Leave the push's group if unread bytes remain there.
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
        """Set the push's state from the thread's outcome. Raise `EngineFailed`, which ends the
        engine.
        """
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
        """Abort the push if it has this version, or was sent with it, or this session (empty: any);
        `poll` then returns it as failed.
        """
        if self.push is not None and version == self.push.manifest.version:
            version = self.push.version  # as it was staged
        push = self._named(version, session)
        push.abort()
        return push

    def close(self) -> None:
        """Drop a failed, unchanged or aborted push. If it has overwritten live weights, quarantine
        them.
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
        """Return the push and its state. Return None if no push of this version is in progress and
        the last push is already live: a commit may be repeated.
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
        """Return the state with a label replaced by the name that it means for this content."""
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
        """Raise `Conflict` during a push."""
        if self.push is not None:
            raise Conflict(
                f"{self.push.title} is being pushed; wait for it or abort it, then {then}"
            )

    def _named(self, version: str, session: str) -> Push:
        """Return the push if it has this version and session (empty: any)."""
        push = self.push
        if (
            push is None
            or version not in ("", push.version)
            or session not in ("", push.manifest.session)
        ):
            of = f"of version {version!r} " if version else ""
            of = of or ("of this weight update " if session else "")
            raise NotFound(f"there is no push {of}in progress; GET /weights lists it")
        return push
