"""The record of a fleet in its gateway's state directory.

`fleet.json` has the fleet's id, the epoch, which grows each time that a gateway opens the file, and
the committed weights. It is replaced by one rename, which is the commit of a push to all replicas:
what it names is to be live everywhere, and everything else is not.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Self

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from tlt_server.errors import Conflict, EngineFailed, StartupError
from tlt_server.process.private import private_directory, replace_file
from tlt_server.wire.commands import Role
from tlt_server.wire.events import WeightState
from tlt_server.wire.labels import label_of

FLEET = "fleet.json"
INITIAL = "initial"  # the version that an engine has before the first push


class Committed(Struct, frozen=True, forbid_unknown_fields=True):
    """Weights that every replica of the fleet has."""

    version: str
    digest: str  # digest of its checksums; empty: unknown, so only the version counts
    staged: str = ""  # version that the push was staged as, where it was named later

    def same(self, digest: str) -> bool:
        """Return True if weights with this digest have the same content."""
        return bool(digest) and digest == self.digest


class FleetRecord(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    fleet: str  # a random id, made once
    epoch: int
    roles: dict[str, Committed] = {}
    adapters: dict[str, Committed] = {}  # by name
    previous: dict[str, Committed] = {}  # role -> what a rollback restores
    pushed: list[str] = []  # roles of the last push, which a rollback undoes

    @property
    def is_initial(self) -> bool:
        """Return True if nothing is committed but what replicas are started with."""
        kept = {each.version for each in (*self.roles.values(), *self.adapters.values())}
        return kept <= {INITIAL} and not self.previous

    def beginning(self, state: WeightState, digests: Mapping[str, str]) -> Self:
        """Return the record of a new fleet, whose first replica has these weights."""
        versions = {"target": state.target, "drafter": state.drafter}
        return replace(
            self,
            roles={
                role: Committed(version, digests.get(role, ""))
                for role, version in versions.items()
                if version
            },
            adapters={name: Committed(version, "") for name, version in state.adapters.items()},
        )

    def committing(self, roles: Mapping[str, Committed], adapter: str = "") -> Self:
        """Return the record after a push. `adapter`: the name of what was pushed for the role
        `adapter`.
        """
        if adapter:
            return replace(self, adapters=self.adapters | {adapter: roles["adapter"]})
        replaced = {
            role: self.roles[role]
            for role, new in roles.items()
            if role in self.roles and self.roles[role].version != new.version
        }
        return replace(
            self,
            roles={**self.roles, **roles},
            previous=self.previous | replaced,
            pushed=[*replaced] or self.pushed,
        )

    def naming(self, version: str, roles: Collection[str] = ("target",)) -> Self:
        """Return the record after the content of these roles was given another name, if it was."""
        named = {
            role: replace(kept, version=version, staged=kept.staged or kept.version)
            for role, kept in self.roles.items()
            if role in roles and version not in (kept.version, label_of(kept.version))
        }
        return replace(self, roles=self.roles | named)

    def without(self, adapter: str) -> Self:
        kept = {name: each for name, each in self.adapters.items() if name != adapter}
        return replace(self, adapters=kept)

    def rolling_back(self, wanted: Mapping[str, Committed]) -> Self:
        previous = {role: kept for role, kept in self.previous.items() if role not in wanted}
        return replace(self, roles={**self.roles, **wanted}, previous=previous, pushed=[])

    def to_roll_back(self, to: str, role: Role | None) -> dict[str, Committed]:
        """Return what a rollback makes live, as one engine would; nothing if it is live. `Conflict`
        if it is not kept.
        """
        kept = {each: was for each, was in self.previous.items() if role in (None, each)}
        if not to:
            wanted = {each: was for each, was in kept.items() if role or each in self.pushed}
        else:
            wanted = {each: was for each, was in kept.items() if was.version == to}
            live = [each for each, now in self.roles.items() if now.version == to]
            if not wanted and any(role in (None, each) for each in live):
                return {}
        if not wanted:
            restored = " or ".join(repr(was.version) for was in kept.values()) or "no version"
            raise Conflict(
                f"the fleet keeps {restored} for a rollback{f', not {to!r}' if to else ''}; name "
                "that, or push the wanted version"
            )
        return wanted


class FleetFile:
    def __init__(
        self, state_dir: Path, superseded: Callable[[EngineFailed], object] = lambda error: None
    ) -> None:
        """Open the file and begin the next epoch. `StartupError` if it cannot be read.
        `superseded`: called, in the thread of a commit, once a later gateway has opened the file.
        """
        private_directory(state_dir, parents=True, exist_ok=True)
        self._path, self._superseded = state_dir / FLEET, superseded
        try:
            found = self._read()
        except (OSError, msgspec.MsgspecError) as error:
            raise StartupError(
                f"{self._path} is damaged ({error}), so the fleet's committed weights are not "
                "known; restore the file, or start with another --state-dir and push again"
            ) from None
        self.record, self._begins = found, True
        self.commit(replace(found, epoch=found.epoch + 1))

    def _read(self) -> FleetRecord:
        if not self._path.exists():
            return FleetRecord(fleet=secrets.token_hex(8), epoch=0)
        return msgspec.json.decode(self._path.read_bytes(), type=FleetRecord)

    def begin(self, state: WeightState, digests: Mapping[str, str]) -> None:
        """Have the weights of a new fleet's first replica. A fleet to which nothing was pushed is
        new at each start of its gateway, since replicas may be started with other models.
        """
        after = self.record.beginning(state, digests)
        if not self.record.roles or (self._begins and self.record.is_initial and after.is_initial):
            self.commit(after)
        self._begins = False

    def commit(self, record: FleetRecord) -> None:
        """Make this the record. If it cannot be written, the one before stays. `EngineFailed` if a
        later gateway has the fleet: this one may have been stopped, and holds no lock on a volume
        that knows none.
        """
        if (epoch := self._read().epoch) > self.record.epoch:
            error = EngineFailed(
                f"{self._path} has epoch {epoch}, this gateway's is {self.record.epoch}, so a "
                "later one has the fleet; ask that one"
            )
            self._superseded(error)
            raise error
        replace_file(self._path, msgspec.json.encode(record))
        self.record = record
