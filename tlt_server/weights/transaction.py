"""One push at a time: begin -> stage and verify in a thread -> commit between two steps -> the
version before is kept.

Owned by the engine's loop, whose thread calls everything here but `_stage`. Invariant: `live`
changes in `commit` and `rollback` only, by one assignment of complete, verified weights; before
that every failure leaves it alone. A version string means one content: a version with other bits
than before is a conflict, the same version and bits again is a success that changes nothing.

Where weights are staged in place (`Storage.in_place`) there is no copy: whoever owns the
transaction keeps the loop from stepping between `start` and the end of the push, and one that fails
after its first write quarantines its roles until the next commit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from tlt_client.channels import Intake, owner
from tlt_server.errors import (
    ChannelBroken,
    Conflict,
    Forbidden,
    InvalidRequest,
    NotFound,
    PushFailed,
    TltError,
    Unavailable,
)
from tlt_server.records import Manifest
from tlt_server.threads import Errands, started
from tlt_server.weights.names import Names
from tlt_server.weights.parts import Changed, DrafterNetwork, Live, TargetNetwork, let_go
from tlt_server.weights.push import Push, first_of
from tlt_server.weights.series import Series
from tlt_server.weights.staging import TIED_HEAD
from tlt_server.weights.work import Options, Work, not_recorded

LOOK_S = 0.05  # between two looks whether a push that waits was aborted


class Transaction:
    def __init__(
        self,
        live: Live,
        options: Options,
        parse_calibration: Callable[[bytes, str], object],
        on_phase: Callable[[str], None] = lambda phase: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`live` may come without sums: they are computed with the first push. `on_phase` is called
        in the staging thread.
        """
        self.live, self.previous = live, Changed()  # of each role what was live before
        self.quarantined: dict[str, str] = {}  # role -> why what is live of it is no version
        self._last: Manifest | None = None  # of the commit that made `live`; None behind a rollback
        self._made: dict[
            str, frozenset[str]
        ] = {}  # roles that the last push of a version made live, of what is live or kept
        for part in live.by_role.values():
            self._note(part.version, self.live_as(part.version).by_role)
        self.push: Push | None = None
        self._options, self.on_phase, self._clock = options, on_phase, clock
        self._work = Work(options, parse_calibration, clock)
        self._names = Names()
        for role, part in live.by_role.items():
            if part.sums:
                self._names.add(role, part)
        self._series = Series()
        self._freeing = Errands("free weights")
        self._settling = Errands("settle spool") if options.spool is not None else None
        self._dropped: list[TargetNetwork | DrafterNetwork] = []
        self._garbage: list[list[Path]] = []  # of the spool, a list per commit

    @property
    def in_place(self) -> bool:
        return self._options.storage.in_place

    @property
    def channels(self) -> tuple[str, ...]:
        return self._options.channels

    @property
    def intake(self) -> Intake:
        return self._options.intake

    @property
    def spooled(self) -> bool:
        return self._options.spool is not None

    # -- the loop's side -----------------------------------------------------------------------------------------

    def begin(self, manifest: Manifest) -> Push:
        """A push that waits for `start`, or the same one where it is on its way already, or goes on
        with this manifest. `Forbidden` where the channel is closed, `Conflict` during another. Of a
        part that cannot begin, for whatever reason, `refuse` is told.
        """
        if manifest.channel not in self._options.channels:
            missing = (
                "--weight-root DIR, the directory that pushes may come from"
                if manifest.channel == "disk"
                else f"{manifest.channel} among its --weight-channels"
            )
            raise Forbidden(
                f"this server takes no weights by {manifest.channel} (open: {', '.join(self.channels) or 'no channel'}): it "
                f"was started without {missing}"
            )
        if self.in_place and not manifest.commit:
            raise InvalidRequest(
                "commit is false, but with --weight-staging none nothing can be staged beside the weights in use; push "
                "with commit true"
            )
        if manifest.partial:
            if self.push is None and self._trails(manifest):
                self.push = Push(manifest, first_of(manifest), trails=True)
                return self.push
            push = self.push if self.push is not None and self.push.takes_more else None
            goes_on = (
                (push is not None and push.goes_on_with(manifest))
                if manifest.session
                else self._series.admit(manifest, push)
            )
            if push is not None and goes_on:
                push.manifest, push.state, push.parts, push.incomplete = (
                    manifest,
                    "waiting",
                    None,
                    False,
                )
                return push
            if push is not None:
                self.close()  # its sender, or another one, has begun again
        if self.push is not None:
            if self.push.manifest == manifest and not manifest.partial and not self.push.aborted:
                return self.push
            raise Conflict(
                f"version {self.push.version or 'without a name'!r} is being pushed; wait for it or abort it, then push again"
            )
        self.push = Push(manifest, first_of(manifest) if manifest.partial else None)
        if self._is_live(manifest):
            self.push.state, self.push.parts = "unchanged", self.live.only(manifest.roles)
        return self.push

    def refuse(self, manifest: Manifest) -> None:
        """It was refused before anything of it was taken, so what it belongs to will not be
        complete, and its bytes stay in its group.
        """
        if manifest.partial and not manifest.session:
            self._series.note(manifest)
            if self.push is not None and self._series.both(self.push.manifest, manifest):
                self._give_up(self.push, f"tensor {manifest.tensors[0].name!r} of it was refused")
        if manifest.group:
            self.skip(manifest.group)

    def brings(self, group: str) -> bool:
        """Whether a push takes, or is about to take, what comes through it."""
        push = self.push
        return (
            push is not None
            and push.manifest.group == group
            and push.state in ("waiting", "staging")
        )

    def skip(self, group: str) -> None:
        """Nobody takes something that comes through it, so it is left before it brings another
        push: now, or once it has brought one.
        """
        if self.push is not None and self.brings(group):
            self.push.out_of_step = True
        else:
            self.leave(group)

    def leave(self, group: str) -> None:
        """What it has brought of a push without a version will not be completed; whoever joins it
        anew begins a push.
        """
        self.intake.groups.leave(group)
        self._series.forget(group)
        push = self.push
        if (
            push is not None
            and push.takes_more
            and push.manifest.group == group
            and not (push.version or push.manifest.session)
        ):
            self._give_up(push, f"group {group!r} was left or joined anew")

    def _give_up(self, push: Push, why: str) -> None:
        if push.takes_more:
            push.state, push.error = "failed", self._gap_error(push, why)
        elif push.state in ("waiting", "staging"):
            push.gap = why

    def start(self) -> None:
        """Stage the push that waits, in a thread; without one it fails."""
        assert self.push is not None and self.push.state == "waiting"
        self.push.state = "staging"
        self.tidy()
        try:
            self.push.thread = started("stage weights", partial(self._stage, self.push))
        except Unavailable as error:
            self.push.error = error

    def _is_live(self, manifest: Manifest) -> bool:
        """A repeated push that says by checksums what it would bring, so that nothing has to be
        brought; from a group it has to.
        """
        return (
            _repeatable(manifest) == self._last
            and bool(manifest.tensors)
            and all(tensor.checksum for tensor in manifest.tensors)
            and not manifest.group
            and not self.quarantined
        )

    def _trails(self, part: Manifest) -> bool:
        """It brings the head that the target ties to its embedding, behind the parts that were
        complete without it.
        """
        target = self.live.target
        return (
            target.network.config.tied_embeddings
            and not self.quarantined
            and self._last is not None
            and {owner(tensor.name, part.role) for tensor in part.tensors}
            == {("target", TIED_HEAD)}
            and self._series.follows(part, self._last)
        )

    def poll(self) -> Push | None:
        """The push, once its thread has ended and until it is closed; its `state` says how it
        stands. One that is gathering: once.

        A group in which it leaves bytes is left.
        """
        push = self.push
        if (
            push is None
            or push.state == "waiting"
            or (push.state == "staging" and push.thread is not None and push.thread.is_alive())
        ):
            return None
        if push.state == "gathering":
            if self._clock() - push.staged_at < self.intake.timeout_s:
                return None
            push.state, push.error = (
                "failed",
                ChannelBroken(
                    f"of version {push.version or 'without a name'!r} nothing came for {self.intake.timeout_s:g} s and {push.missing}; "
                    "push all of them again" + push.spoiled
                ),
            )
        if push.state == "staging":
            self._judge(push)
        if push.unread:
            self.leave(push.manifest.group)
            push.out_of_step = False
        return push

    def commit(self) -> Live:
        """Make the staged parts live; the caller installs what is returned before the next step."""
        assert self.push is not None and self.push.state == "staged" and self.push.parts is not None
        parts, manifest = self.push.parts, self.push.manifest
        before = self.previous.only(parts.by_role)
        self._make_live(parts)
        self._drop(before)
        for role in parts.by_role:
            self.quarantined.pop(role, None)
        if self.in_place:
            self.previous = Changed()  # its storage holds these now
        self._last, self.push = _repeatable(manifest), None
        self._note(parts.version, parts.by_role)
        return self.live

    def close(self) -> None:
        """Drop the push that failed, is unchanged or was aborted; one that has written over live
        weights quarantines them.
        """
        push, self.push = self.push, None
        if push is None:
            return
        if push.state == "unchanged" and push.parts is not None:
            self._note(push.version, push.parts.by_role)
        elif push.state != "waiting":
            self._made.pop(push.version, None)  # a commit of this version may mean what has failed
        if push.overwritten and push.state != "unchanged":
            which = f"of version {push.version!r}" if push.version else "without a name"
            reason = f"a push {which} wrote over the {{role}}'s weights in use (--weight-staging none) and failed"
            self.quarantined |= {role: reason.format(role=role) for role in push.overwritten}
            self._last = None
        if push.staging is not None:
            self._dropped += push.staging.networks
            push.staging = None
        if self._options.spool is not None:
            self._garbage.append(self._options.spool.discarded())

    def abort(self, version: str = "", session: str = "") -> Push:
        """Ask the push of this version or session to end, or any; `poll` gives it back as failed."""
        push = self._named(version, session)
        push.aborted = True
        if push.state in ("waiting", "gathering", "staged"):
            push.state, push.error = "failed", self._abort_error(push)
        elif push.staging is not None:
            push.staging.stop()
        return push

    def ready_to_commit(self, version: str, session: str = "") -> Push | None:
        """None where no push of this version is on its way and the last one is what is live: a
        commit may be asked for again.
        """
        push, roles = self.push, self._made.get(version)
        if (
            roles
            and roles <= {*self.live_as(version).by_role}
            and (push is None or push.version != version)
        ):
            return None
        push = self._named(version, session)
        if push.state == "gathering":
            raise Conflict(
                f"version {push.version or 'without a name'!r} is not complete: {push.missing}; push them, then commit"
            )
        if push.state != "staged":
            raise Conflict(
                f"version {push.version or 'without a name'!r} is not staged yet ({push.state}); wait for the push to be "
                "answered, then commit"
            )
        return push

    def live_as(self, version: str) -> Changed:
        """What is live as this version, and whole."""
        return self.live.only(
            [
                role
                for role, part in self.live.by_role.items()
                if part.version == version and role not in self.quarantined
            ]
        )

    def name_staged(self, version: str) -> None:
        """Commit what is staged as this version; `Conflict` when that is the name of other content."""
        push, spool = self.push, self._options.spool
        assert push is not None and push.parts is not None
        parts = push.parts.named(version)
        self._names.check(parts, self.live, self.previous)
        if spool is not None:
            try:
                spool.prepare(parts, self.live.updated(parts))
            except OSError as error:
                raise not_recorded(error) from None
        push.parts = parts

    def name_live(self, version: str, of: str = "") -> bool:
        """Call the live target `version`; False where that is its name. `Conflict` during a push,
        for the name of other content, or where what is live is not `of`, if given.
        """
        target, spool = self.live.target, self._options.spool
        if target.version == version:
            return False
        if self.push is not None:
            raise Conflict(
                f"version {self.push.version!r} is being pushed; wait for it or abort it, then name what is live"
            )
        if of not in ("", target.version):
            raise Conflict(
                f"version {of!r} was to be called {version!r} and is not live any more, {target.version!r} is; push it again"
            )
        if "target" in self.quarantined:
            raise Conflict(
                f"what is live is no version ({self.quarantined['target']}); push one, and name that"
            )
        if spool is not None:
            self.live = self.live.complete()
        renamed = self.live.only(["target"]).named(version)
        self._names.check(renamed, self.live, self.previous)
        if spool is not None:
            try:
                spool.prepare(Changed(), self.live.updated(renamed))
                spool.commit()
            except OSError as error:
                raise not_recorded(error) from None
        self.live = self.live.updated(renamed)
        self._note(version, {"target"})
        if renamed.sums:
            self._names.add("target", renamed.by_role["target"])
        return True

    def to_roll_back(self, to: str) -> Changed:
        """What a rollback makes live: of each role that had version `to` before, that; without
        `to`, of the roles of the last commit. None where `to` is live. `Conflict` where it is
        neither live nor kept.
        """
        if self.push is not None:
            raise Conflict(
                f"version {self.push.version!r} is being pushed; wait for it or abort it, then roll back"
            )
        of_last = self._last.roles if self._last is not None else ()
        parts = self.previous.only(
            [role for role, part in self.previous.by_role.items() if part.version == to]
            if to
            else of_last
        )
        if parts.by_role or (to and self.live_as(to).by_role):
            return parts
        if to and self.previous.by_role:
            kept = ", ".join(
                dict.fromkeys(repr(part.version) for part in self.previous.by_role.values())
            )
            raise Conflict(
                f"version {to!r} is not kept; a rollback can restore {kept}: name that, or push {to!r} again"
            )
        raise Conflict(
            "there is no version to roll back to: none was pushed yet, or the last step was a rollback already; "
            "push the version wanted"
        )

    def rollback(self, parts: Changed) -> Live:
        """What a rollback was found to restore is live again, from the very storage it had; what it
        replaces is not kept.
        """
        if self._options.spool is not None:
            try:
                self._options.spool.prepare(Changed(), self.live.updated(parts))
            except OSError as error:
                raise not_recorded(error) from None
        self._make_live(parts)
        self._drop(self.previous.only(parts.by_role))
        self.previous = self.previous.only(self.previous.by_role.keys() - parts.by_role.keys())
        self._last = None
        return self.live

    @property
    def untidy(self) -> bool:
        """Whether `tidy` has something to do."""
        return bool(self._dropped or self._garbage)

    def tidy(self, *, wait: bool = False) -> None:
        """Let go of what nobody uses any more, in threads, as it takes a while. Between two steps,
        once what is live is installed. `wait`: until the memory is free.
        """
        if self._dropped:
            self._freeing.give(partial(let_go, self._dropped))
            self._dropped = []
        for paths in self._garbage:
            assert self._options.spool is not None and self._settling is not None
            self._settling.give(partial(self._options.spool.settle, paths))
        self._garbage.clear()
        if wait:
            self._freeing.mark().wait()

    # -- inside --------------------------------------------------------------------------------------------------

    def _make_live(self, parts: Changed) -> None:
        previous, live = self.live.only(parts.by_role), self.live.updated(parts)
        spool = self._options.spool
        if spool is not None:
            try:
                spool.commit()
            except OSError as error:
                raise not_recorded(error) from None
        self.live, self.previous = live, self.previous.updated(previous)
        for role, part in parts.by_role.items():
            self._names.add(role, part)
        if spool is not None:
            self._garbage.append(spool.garbage([self.live, self.previous]))

    def _note(self, version: str, roles: Collection[str]) -> None:
        """These roles were made live as this version."""
        kept = {
            part.version for parts in (self.live, self.previous) for part in parts.by_role.values()
        }
        self._made = {
            version: roles for version, roles in self._made.items() if version in kept
        } | {version: frozenset(roles)}

    def _drop(self, parts: Changed) -> None:
        self._dropped += [part.network for part in parts.by_role.values()]

    def _judge(self, push: Push) -> None:
        """Once, when the thread has ended."""
        push.staged_at = self._clock()
        if push.aborted:
            push.error = self._abort_error(push)
        elif push.error is None and push.gap:
            push.error = self._gap_error(push, push.gap)
        elif push.error is None and push.trails:
            self._judge_trailing(push)
        elif push.error is None and push.incomplete:
            push.state = "gathering"
        elif push.error is None and push.parts is None:
            push.error = PushFailed(
                "the staging thread ended without a result; nothing has changed: push again"
            )
        elif push.error is None and push.parts is not None:
            try:
                self._names.check(push.parts, self.live, self.previous)
            except Conflict as error:
                push.error = error
            live = self.live.by_role
            same = not self.quarantined and all(
                role in live
                and (live[role].version, live[role].digest) == (part.version, part.digest)
                for role, part in push.parts.by_role.items()
            )
            push.state = "unchanged" if same else "staged"
        if push.error is not None:
            push.state = "failed"
            push.error = type(push.error)(push.error.message + push.spoiled)

    def _judge_trailing(self, push: Push) -> None:
        assert push.staging is not None
        try:
            push.staging.check_repeated()
            push.state, push.parts = "unchanged", self.live.only(["target"])
        except TltError as error:
            push.error = error

    def _named(self, version: str, session: str) -> Push:
        """The push, where it is of this version and session; empty: of any."""
        push = self.push
        if (
            push is None
            or version not in ("", push.version)
            or session not in ("", push.manifest.session)
        ):
            of = (
                f"of version {version!r} "
                if version
                else "of this weight update "
                if session
                else ""
            )
            raise NotFound(f"there is no push {of}on its way; GET /weights says what there is")
        return push

    @staticmethod
    def _gap_error(push: Push, why: str) -> TltError:
        return Conflict(
            f"the push of version {push.version or 'without a name'!r} cannot become complete: {why}; push all of its tensors "
            f"again{push.spoiled if push.takes_more else ''}"
        )

    @staticmethod
    def _abort_error(push: Push) -> TltError:
        return Conflict(
            f"the push of version {push.version or 'without a name'!r} was aborted; nothing has changed"
        )

    # -- the staging thread's side -------------------------------------------------------------------------------

    def _stage(self, push: Push) -> None:
        for done in [
            errands.mark() for errands in (self._freeing, self._settling) if errands is not None
        ]:
            while not (done.wait(LOOK_S) or push.aborted):
                pass  # what was dropped may take the room that this one needs
        self._work.do(push, self._complete_live, self.on_phase)

    def _complete_live(self) -> Live:
        """The sums of what the engine was started with, which nobody needed before."""
        self.live = self.live.complete()
        for role, part in self.live.by_role.items():
            self._names.add(role, part)
        return self.live


def _repeatable(manifest: Manifest) -> Manifest:
    """What it has in common with one that repeats it, whose upload may have lain elsewhere, or be
    gone.
    """
    return replace(manifest, session="", path="" if manifest.channel == "http" else manifest.path)
