"""The active weights, each role's previous version, and the content of every version name.

`live` changes only in `commit`, `roll_back` and `rename`, by one assignment of complete, verified
weights. A version string means one content: other bits under the same name are a conflict.
"""

from __future__ import annotations

from collections import ChainMap, OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import replace as replaced_part

from msgspec.structs import replace

from tlt_client.channels import PEER, TRAINED
from tlt_client.channels.checksums import digest
from tlt_server.errors import Conflict
from tlt_server.weights.parts import Adapter, Changed, Live, Part
from tlt_server.weights.spool import Cleanup, Spool, not_recorded
from tlt_server.wire.commands import Manifest, Role
from tlt_server.wire.labels import apart, label_of

REMEMBERED = 2**14


class Names:
    """Maps version names to content, to tell a retry from a mistake. It covers the live and the
    previous versions while they are kept, and recent live versions. A label may be given to other
    content, which then gets its own name.
    """

    def __init__(self, started: Iterable[str] = ()) -> None:
        """`started`: the versions of all roles at the engine's start."""
        self._started = frozenset(started)
        # (role, or the adapter; version) -> content
        self._digests: OrderedDict[tuple[str, str], str] = OrderedDict()
        self._forgotten = False  # a name that is not remembered may have had content

    def settled(self, parts: Changed, *kept: Live | Changed, labelled: bool) -> Changed:
        """Return the parts under the name that their version means. For a label, that is the label
        itself or, if it is remembered for other content, the label with the digest. `Conflict` if
        the name belongs to other content, remembered or in `kept`.
        """
        known_by = ChainMap(_in_use(kept), self._digests)

        def others(parts: Changed, unknown: str | None) -> list[tuple[str, Part, str]]:
            """Return the parts whose name has other content, with its digest appended."""
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
        """Return True if the role may have had this version. The versions at the engine's start are
        not known by role.
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
        """`live` may lack checksums: the first push computes them."""
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
        """Return the live weights with checksums, which are computed once. Called by threads."""
        self.live = self.live.complete()
        for role, part in self.live.by_role.items():
            self._names.add(role, part)
        return self.live

    def live_as(self, version: str, role: Role | None = None) -> Changed:
        """Return the live weights if they are complete and have this version; `role`: only that
        role.
        """
        return self.live.only(
            [
                each
                for each, part in self.live.by_role.items()
                if part.version == version and each not in self.quarantined and role in (None, each)
            ]
        )

    def made(self, version: str) -> bool:
        """Return True if everything that the last push of this version installed is still live."""
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
        """Return True if the manifest and its checksums repeat the last commit, so that no transfer
        is needed. A push through a group is False, as its bytes must be read anyway.
        """
        return (
            _repeatable(manifest) == self.last
            and bool(manifest.tensors)
            and all(tensor.checksum for tensor in manifest.tensors)
            and not manifest.group
            and not self.quarantined
        )

    def named(self, changed: Changed, *, labelled: bool) -> Changed:
        """Return the weights under the name that their version or label means. `Conflict` if that
        name belongs to other content. Called by threads.
        """
        return self._names.settled(changed, self.live, self.previous, labelled=labelled)

    # -- changes -----------------------------------------------------------------------------------

    def commit(self, changed: Changed, manifest: Manifest, *, in_place: bool) -> Live:
        """Make staged weights live. In place they overwrite the previous version."""
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
        """Drop an unused adapter; call it only while no push is in progress."""
        if self._spool is not None:
            self.live = self.live.complete()
        network, live = self.live.adapters[name].network, self.live.without(name)
        self.record(Changed(), live)
        self._make_live(Changed(), live)
        self._cleanup.drop([network])

    def rename(self, version: str, of: str = "") -> bool:
        """Rename the live target to the label `version`; return False if it already has that label.
        `Conflict` if `of` is given and is not the live version.
        """
        target = self.live.target
        if label_of(target.version) == version:
            return False
        if of not in ("", target.version):
            raise Conflict(
                f"version {of!r} cannot be renamed to {version!r}: it is no longer live, "
                f"{target.version!r} is; push it again"
            )
        if "target" in self.quarantined:
            raise Conflict(
                f"the live target is quarantined ({self.quarantined['target']}); push one and "
                "name that one"
            )
        if self._spool is not None:
            self.live = self.live.complete()
        renamed = self.named(self.live.only(["target"]).named(version), labelled=True)
        self.record(Changed(), self.live.updated(renamed))
        self._make_live(renamed, self.live.updated(renamed))
        self.note(self.live.target.version, {"target"})
        return True

    def to_roll_back(self, to: str, role: Role | None = None) -> Changed:
        """Return the weights that a rollback restores: version `to` of each role that had it or,
        without `to`, the previous version of `role` or of the roles of the last push. Return
        nothing if `to` is live. `Conflict` if `to` is neither live nor kept for `role`, or for the
        target if the target may have had a version of that name.
        """
        before = self.previous.by_role
        if not to:
            parts = self.previous.only([role] if role else self._pushed)
            if parts.by_role:
                return parts
            of = f" of the {role}" if role else ""
            raise Conflict(
                f"no version{of} is kept for a rollback: none was pushed since the engine "
                "started, or the last change was a rollback; push the wanted version"
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
        """Make these weights live again, in their old storage. The weights that they replace are
        not kept.
        """
        self.record(Changed(), self.live.updated(parts))
        self._replace(parts)
        self._cleanup.drop_parts(self.previous.only(parts.by_role))
        self.previous = self.previous.only(self.previous.by_role.keys() - parts.by_role.keys())
        self.last, self._pushed = None, ()
        return self.live

    def record(self, pushed: Changed, live: Live) -> None:
        """Prepare the spool for `live`; `pushed` is the part that came with the staged push."""
        if self._spool is None:
            return
        try:
            self._spool.prepare(pushed, live)
        except OSError as error:
            raise not_recorded(error) from None

    def quarantine(self, roles: Collection[str], version: str) -> None:
        """Mark roles whose live weights a failed push has overwritten."""
        which = f"of version {version!r}" if version else "without a name"
        self.quarantined |= {
            role: f"a push {which} wrote over the {role}'s weights in use (--weight-staging none) "
            "and failed"
            for role in roles
        }
        self.last = None

    def note(self, version: str, roles: Collection[str]) -> None:
        """Record that these roles were made live as this version."""
        kept = {
            part.version for parts in (self.live, self.previous) for part in parts.by_role.values()
        }
        self._made = {
            version: roles for version, roles in self._made.items() if version in kept
        } | {version: frozenset(roles)}

    def forget(self, version: str) -> None:
        """Forget the last push: a commit of this version may mean a push that has failed."""
        self._made.pop(version, None)

    def _replace(self, changed: Changed) -> None:
        """Make these weights live, and keep the ones that they replace."""
        previous = self.previous.updated(self.live.only(changed.by_role))
        self._make_live(changed, self.live.updated(changed), previous)

    def _make_live(self, changed: Changed, live: Live, previous: Changed | None = None) -> None:
        """Commit the record that `record` prepared, then use `live`, whose new parts are
        `changed`.
        """
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
    """Return the manifest without fields that may differ in a repetition: its upload may have moved
    or been removed.
    """
    moves = manifest.channel in ("http", PEER)
    return replace(manifest, session="", key="", path="" if moves else manifest.path)
