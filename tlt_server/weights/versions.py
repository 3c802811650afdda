"""The weights in use, the version before of each role, and what their names stand for.

`live` changes in `commit`, `roll_back` and `rename` only, by one assignment of complete, verified
weights. A version string means one content: other bits under the same name are a conflict.
"""

from __future__ import annotations

from collections import ChainMap, OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import replace as replaced_part

from msgspec.structs import replace

from tlt_client.channels import TRAINED
from tlt_client.channels.checksums import digest
from tlt_server.errors import Conflict
from tlt_server.weights.parts import Adapter, Changed, Live, Part
from tlt_server.weights.spool import Cleanup, Spool, not_recorded
from tlt_server.wire.commands import Manifest, Role
from tlt_server.wire.labels import apart, label_of

REMEMBERED = 2**14


class Names:
    """The content that each version's name stands for, so that a retry is told from a mistake: of
    the live and the previous versions, for as long as they are kept, and of the last ones that were
    live. A label may be given to other content, which then gets a name of its own.
    """

    def __init__(self, started: Iterable[str] = ()) -> None:
        """`started`: the versions that the engine started with, of all roles."""
        self._started = frozenset(started)
        # (role, or the adapter; version) -> content
        self._digests: OrderedDict[tuple[str, str], str] = OrderedDict()
        self._forgotten = False  # a name that is not remembered may have had content

    def settled(self, parts: Changed, *kept: Live | Changed, labelled: bool) -> Changed:
        """Return the parts under the name that their version means: of a label, the label, or
        where that is remembered for other content, the label with the digest. `Conflict` when the
        name belongs to other content, remembered or of `kept`.
        """
        known_by = ChainMap(_in_use(kept), self._digests)

        def others(parts: Changed, unknown: str | None) -> list[tuple[str, Part, str]]:
            """Return the parts whose name has other content, with its digest."""
            found = ((*each, known_by.get(_key(*each), unknown)) for each in parts.parts)
            return [
                (role, part, known)
                for role, part, known in found
                if known is not None and known != part.digest
            ]

        if labelled and (taken := others(parts, "" if self._forgotten else None)):
            part = taken[0][1]
            content = part.digest if isinstance(part, Adapter) else digest(parts.sums)
            parts = parts.named(apart(part.version, content))
        for role, part, known in others(parts, None):
            of = f"adapter {part.name!r}" if isinstance(part, Adapter) else f"the {role}"
            raise Conflict(
                f"version {part.version!r} of {of} was pushed before with other content "
                f"(digest {known[:12]}, now {part.digest[:12]}); give changed weights a new version"
            )
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


class Versions:
    def __init__(self, live: Live, spool: Spool | None, cleanup: Cleanup) -> None:
        """`live` may come without checksums: they are computed with the first push."""
        self.live, self.previous = live, Changed()
        self.quarantined: dict[str, str] = {}  # role -> why its live weights are no version
        self.last: Manifest | None = None  # the last commit's; None after a rollback
        self._pushed: Collection[str] = ()  # roles of the last push that a rollback can undo
        self._spool, self._cleanup = spool, cleanup
        # Version -> the roles that its last push made live; of versions that are live or kept.
        self._made: dict[str, frozenset[str]] = {}
        self._names = Names(part.version for part in live.by_role.values())
        for version in {part.version for part in live.by_role.values()}:
            self.note(version, self.live_as(version).by_role)
        for role, part in live.parts:
            if part.sums:
                self._names.add(role, part)

    # -- what is live ------------------------------------------------------------------------------

    def completed(self) -> Live:
        """Return what is live, with checksums, which are computed once. Called by threads."""
        self.live = self.live.complete()
        for role, part in self.live.by_role.items():
            self._names.add(role, part)
        return self.live

    def live_as(self, version: str, role: Role | None = None) -> Changed:
        """Return what is live as this version, and whole; `role`: that alone."""
        return self.live.only(
            [
                each
                for each, part in self.live.by_role.items()
                if part.version == version and each not in self.quarantined and role in (None, each)
            ]
        )

    def made(self, version: str) -> bool:
        """Return True if all that the last push of this version made live is live."""
        roles = self._made.get(version, frozenset())
        return bool(roles) and roles <= {*self.live_as(version).by_role}

    def has(self, changed: Changed) -> bool:
        """Return True if these weights are live under these versions."""
        if changed.adapter is not None:
            adapter = self.live.adapters.get(changed.adapter.name)
            return adapter is not None and (adapter.version, adapter.digest) == (
                changed.adapter.version,
                changed.adapter.digest,
            )
        live = self.live.by_role
        return not self.quarantined and all(
            role in live and (live[role].version, live[role].digest) == (part.version, part.digest)
            for role, part in changed.by_role.items()
        )

    def repeats(self, manifest: Manifest) -> bool:
        """Return True if the manifest repeats the last commit, and its checksums say so before
        anything is brought. What comes through a group has to be taken from there in any case.
        """
        return (
            _repeatable(manifest) == self.last
            and bool(manifest.tensors)
            and all(tensor.checksum for tensor in manifest.tensors)
            and not manifest.group
            and not self.quarantined
        )

    def named(self, changed: Changed, *, labelled: bool) -> Changed:
        """Return the weights under the name that their version, which may be a label, means.
        `Conflict` when that belongs to other content. Called by threads.
        """
        return self._names.settled(changed, self.live, self.previous, labelled=labelled)

    # -- changes -----------------------------------------------------------------------------------

    def commit(self, changed: Changed, manifest: Manifest, *, in_place: bool) -> Live:
        """Make staged weights live. In place, the version before is gone, as they lie in its
        storage.
        """
        roles = changed.by_role.keys()
        before = self.previous.only(roles)
        self._replace(changed)
        self._cleanup.drop_parts(before)
        for role in roles:
            self.quarantined.pop(role, None)
        if in_place:
            self.previous = Changed()
        self.last = _repeatable(manifest)
        adopted = manifest.channel == TRAINED  # by the server itself, so no push of a caller
        self._pushed = {*self._pushed} - {*roles} if adopted else roles
        self.note(changed.version, roles)
        return self.live

    def load(self, adapter: Adapter) -> Live:
        """Make an adapter live, in the slot of the version that it replaces, or in a free one."""
        replaced = self.live.adapters.get(adapter.name)
        taken = {other.slot for other in self.live.adapters.values()}
        free = (slot for slot in range(len(taken) + 1) if slot not in taken)
        adapter = replaced_part(adapter, slot=replaced.slot if replaced else next(free))
        changed = Changed(adapter=adapter)
        self._make_live(changed, self.live.updated(changed))
        if replaced is not None:
            self._cleanup.drop([replaced.network])
        return self.live

    def unload(self, name: str) -> None:
        """Drop an adapter that nothing uses; no push may be on its way."""
        if self._spool is not None:
            self.live = self.live.complete()
        network, live = self.live.adapters[name].network, self.live.without(name)
        self.record(Changed(), live)
        self._make_live(Changed(), live)
        self._cleanup.drop([network])

    def rename(self, version: str, of: str = "") -> bool:
        """Call the live target by the label `version`; False where that is its label. `Conflict`
        where what is live is not `of`, if given.
        """
        target = self.live.target
        if label_of(target.version) == version:
            return False
        if of not in ("", target.version):
            raise Conflict(
                f"version {of!r} was to be called {version!r} and is not live any more, "
                f"{target.version!r} is; push it again"
            )
        if "target" in self.quarantined:
            raise Conflict(
                f"what is live is no version ({self.quarantined['target']}); push one, and name "
                "that"
            )
        if self._spool is not None:
            self.live = self.live.complete()
        renamed = self.named(self.live.only(["target"]).named(version), labelled=True)
        self.record(Changed(), self.live.updated(renamed))
        self._make_live(renamed, self.live.updated(renamed))
        self.note(self.live.target.version, {"target"})
        return True

    def to_roll_back(self, to: str, role: Role | None = None) -> Changed:
        """Return what a rollback makes live: for each role that had version `to` before, that;
        without `to`, the version before of `role`, or of the roles of the last push. Empty where
        `to` is live. `Conflict` where it is neither live nor kept, for `role` or, if the target may
        have had a version of that name, for the target.
        """
        before = self.previous.by_role
        if not to:
            parts = self.previous.only([role] if role else self._pushed)
            if parts.by_role:
                return parts
            of = f" of the {role}" if role else ""
            raise Conflict(
                f"no version{of} is kept to go back to: none was pushed since the engine started, "
                "or the last step was a rollback already; push the version wanted"
            )
        had = [each for each in before if before[each].version == to and role in (None, each)]
        found = {*had, *self.live_as(to, role).by_role}
        decisive = role or ("target" if self._names.may_have_been("target", to) else None)
        if found and decisive in (None, *found):
            return self.previous.only(had)
        of = f" of the {decisive}" if decisive else ""
        alone = ' (only the drafter has that name: add {"role": "drafter"} if it is meant)'
        kept = [part.version for each, part in before.items() if role in (None, each)]
        restored = " or ".join(repr(version) for version in dict.fromkeys(kept)) or "no version"
        raise Conflict(
            f"version {to!r}{of} is not kept{alone if found else ''}; a rollback can restore "
            f"{restored}: name that, or push {to!r} again"
        )

    def roll_back(self, parts: Changed) -> Live:
        """Make these weights live again, in the storage they had. What they replace is not kept."""
        self.record(Changed(), self.live.updated(parts))
        self._replace(parts)
        self._cleanup.drop_parts(self.previous.only(parts.by_role))
        self.previous = self.previous.only(self.previous.by_role.keys() - parts.by_role.keys())
        self.last, self._pushed = None, ()
        return self.live

    def record(self, pushed: Changed, live: Live) -> None:
        """Prepare the spool for `live`, of which `pushed` came with the push that is staged."""
        if self._spool is None:
            return
        try:
            self._spool.prepare(pushed, live)
        except OSError as error:
            raise not_recorded(error) from None

    def quarantine(self, roles: Collection[str], version: str) -> None:
        """Mark roles whose live weights a failed push has written over."""
        which = f"of version {version!r}" if version else "without a name"
        self.quarantined |= {
            role: f"a push {which} wrote over the {role}'s weights in use (--weight-staging none) "
            "and failed"
            for role in roles
        }
        self.last = None

    def note(self, version: str, roles: Collection[str]) -> None:
        """Remember that these roles were made live as this version."""
        kept = {
            part.version for parts in (self.live, self.previous) for part in parts.by_role.values()
        }
        self._made = {
            version: roles for version, roles in self._made.items() if version in kept
        } | {version: frozenset(roles)}

    def forget(self, version: str) -> None:
        """Drop what was noted: a commit of this version may mean a push that has failed."""
        self._made.pop(version, None)

    def _replace(self, changed: Changed) -> None:
        """Make these weights live, and keep those that they replace."""
        previous = self.previous.updated(self.live.only(changed.by_role))
        self._make_live(changed, self.live.updated(changed), previous)

    def _make_live(self, changed: Changed, live: Live, previous: Changed | None = None) -> None:
        """Make `live`, in which `changed` is new, that which a restart loads, and use it."""
        if self._spool is not None:
            try:
                self._spool.commit()
            except OSError as error:
                raise not_recorded(error) from None
        self.live, self.previous = live, previous or self.previous
        for role, part in changed.by_role.items():
            if part.sums:
                self._names.add(role, part)
        if self._spool is not None:
            self._cleanup.discard(self._spool.garbage([self.live, self.previous]))


def _repeatable(manifest: Manifest) -> Manifest:
    """Return what the manifest has in common with one that repeats it. An upload that it names may
    have lain elsewhere, or be gone.
    """
    return replace(manifest, session="", path="" if manifest.channel == "http" else manifest.path)
