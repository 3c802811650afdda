"""Keeps committed weights under the state directory, so that a restarted engine loads exactly the
committed weights.

Files are written during staging, from the bytes that were verified. Only confirmed uploads by http,
which the server alone writes, are linked: a link to a trainer's file would change if the trainer
rewrote that file in place. The commit itself is one rename of `current.json`; folders that it does
not name are garbage and are removed. The transaction calls this module; the engine calls `current`
at start.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import threading
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path

import msgspec

from tlt_server.errors import PushFailed, StartupError, TltError
from tlt_server.process.private import FILE, private_directory, private_file
from tlt_server.process.threads import Errands
from tlt_server.weights.parts import Changed, Live, Network, Part, let_go
from tlt_server.wire.kept import CURRENT, WEIGHTS, Current, KeptVersion

PUSH_PREFIX = "push-"
# Errors of a file system that cannot link.
NO_LINKS = (errno.EXDEV, errno.EPERM, errno.ENOTSUP, errno.EMLINK)
# A file's bytes; or a file below the state directory that is not written any more.
Data = Iterable[bytes | memoryview] | Path


class Spool:
    """One directory of mode 0700, written by one engine at a time."""

    def __init__(self, state_dir: Path, model: str) -> None:
        self.directory, self._model = state_dir / WEIGHTS, model
        private_directory(self.directory, parents=True, exist_ok=True)
        self._pushed: Path | None = None
        self._draft = self.directory / f"{CURRENT}.new"
        self._places: dict[tuple[str, str], str] = {}  # (role, digest) -> directory
        self._prepared: dict[tuple[str, str], str] = {}  # the same after the next commit
        # Role -> the version that could not be restored, recorded until a commit of that role.
        self._lost: dict[str, KeptVersion] = {}
        self._pushing: set[str] = set()  # roles that the next commit brings
        self.adapters: Mapping[str, KeptVersion] = {}  # those that `current` found

    # -- while a push is staged, in its thread -----------------------------------------------------

    def begin(self) -> None:
        """Make the folder of this push, unless an earlier part of the push made it."""
        if self._pushed is None:
            self._pushed = private_directory(
                self.directory / f"{PUSH_PREFIX}{secrets.token_hex(8)}"
            )

    def keep(self, role: str, file: str, data: Data) -> None:
        """Write or link a file. A written file may be written again with other bytes; a linked one
        may not, as that would write through the link.
        """
        assert self._pushed is not None
        path = self._pushed / role / file
        private_directory(path.parent, exist_ok=True)
        if isinstance(data, Path):
            _link(data, path)
        else:
            with open(path, "wb", opener=private_file) as out:
                out.writelines(data)
        _sync(path)

    def discarded(self) -> list[Path]:
        """Give up the push before it becomes a version; return its folders, for `settle`."""
        pushed, self._pushed = self._pushed, None
        return [pushed] if pushed is not None else []

    def prepare(self, pushed: Changed, live: Live) -> None:
        """Write the file that `commit` will rename. It describes `live`; `pushed` is the part of
        `live` that came with the kept push. If this fails, the previous prepared file remains.
        """
        new = (
            {
                (role, part.digest): f"{self._pushed.name}/{role}"
                for role, part in pushed.by_role.items()
            }
            if self._pushed
            else {}
        )
        prepared, pushing = {**self._places, **new}, set(pushed.by_role)

        def kept(role: str, part: Part) -> KeptVersion:
            directory = prepared.get((role, part.digest), "")
            return KeptVersion(version=part.version, digest=part.digest, directory=directory)

        roles = {role: kept(role, part) for role, part in live.by_role.items()}
        roles |= {role: lost for role, lost in self._lost.items() if role not in pushing}
        adapters = {name: kept("adapter", part) for name, part in live.adapters.items()}
        unfinished = self._draft.with_suffix(".unfinished")
        with open(unfinished, "wb", opener=private_file) as out:
            current = Current(model=self._model, roles=roles, adapters=adapters)
            out.write(msgspec.json.encode(current))
            out.flush()
            os.fsync(out.fileno())
        unfinished.replace(self._draft)
        self._prepared, self._pushing = prepared, pushing

    # -- between two steps -------------------------------------------------------------------------

    def commit(self) -> None:
        """Rename the prepared file, so that a restart loads the weights it describes."""
        self._draft.replace(self.directory / CURRENT)
        self._places, self._pushed = self._prepared, None
        self._lost = {role: kept for role, kept in self._lost.items() if role not in self._pushing}

    def garbage(self, wanted: Iterable[Live | Changed]) -> list[Path]:
        """Return the folders that no restart, and no rollback to one of `wanted`, can need. Call it
        only while no push is staged.
        """
        used = set()
        for parts in wanted:
            used |= {(role, part.digest) for role, part in parts.by_role.items()}
            if isinstance(parts, Live):
                used |= {("adapter", part.digest) for part in parts.adapters.values()}
        used |= {(role, kept.digest) for role, kept in self._lost.items()}
        self._places = {key: place for key, place in self._places.items() if key in used}
        kept = {place.partition("/")[0] for place in self._places.values()}
        return [
            folder for folder in self.directory.glob(f"{PUSH_PREFIX}*") if folder.name not in kept
        ]

    # -- off the critical path, in any thread ------------------------------------------------------

    def settle(self, garbage: Iterable[Path]) -> None:
        """Make the last rename durable, then remove the garbage."""
        with contextlib.suppress(OSError):
            _sync(self.directory)
        for folder in garbage:
            shutil.rmtree(folder, ignore_errors=True)

    # -- at start ----------------------------------------------------------------------------------

    def current(self) -> Mapping[str, KeptVersion]:
        """Return role -> last live version; empty before the first commit. `StartupError` if it
        cannot be read.
        """
        path = self.directory / CURRENT
        try:
            current = msgspec.json.decode(path.read_bytes(), type=Current)
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.MsgspecError) as error:
            raise StartupError(
                f"{path} is damaged ({error}), so the committed weight version is not known; "
                "restore the file, or start with another --state-dir and push again"
            ) from None
        if current.model != self._model:
            raise StartupError(
                f"the state directory {self.directory} belongs to the model {current.model}, not "
                f"{self._model}; name another --state-dir"
            )
        self.adapters = current.adapters
        adapters = [("adapter", kept) for kept in current.adapters.values()]
        for role, kept in [*current.roles.items(), *adapters]:
            if kept.directory:
                self._places[role, kept.digest] = kept.directory
        return current.roles

    def lose(self, role: str, kept: KeptVersion) -> None:
        """Record a version that was not restored. Later restarts report it as lost again, even
        after commits of the other role.
        """
        self._lost[role] = kept

    def sweep(self) -> None:
        """Remove the folders of pushes that were never committed; after `current`."""
        kept = {place.partition("/")[0] for place in self._places.values()}
        self.settle(
            [folder for folder in self.directory.glob(f"{PUSH_PREFIX}*") if folder.name not in kept]
        )


def not_recorded(error: OSError) -> TltError:
    return PushFailed(
        f"the commit cannot be recorded in the state directory ({error}), so nothing has changed; "
        "make room there and push again"
    )


def _link(file: Path, path: Path) -> None:
    try:
        os.link(file, path)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        shutil.copyfile(file, path)
        path.chmod(FILE)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Cleanup:
    """Frees networks and removes unused spool folders, in threads because both are slow."""

    def __init__(self, spool: Spool | None) -> None:
        self._spool = spool
        self._freeing = Errands("free weights")
        self._settling = Errands("settle spool") if spool is not None else self._freeing
        self._networks: list[Network] = []
        self._folders: list[list[Path]] = []  # a list for each commit

    @property
    def due(self) -> bool:
        """Return True if `run` has work."""
        return bool(self._networks or self._folders)

    def drop(self, networks: Iterable[Network]) -> None:
        self._networks += networks

    def drop_parts(self, parts: Changed) -> None:
        self.drop(part.network for part in parts.by_role.values())

    def discard(self, folders: list[Path]) -> None:
        """Remove folders, after making the spool's last rename durable."""
        self._folders.append(folders)

    def run(self, *, wait: bool = False) -> None:
        """Release dropped weights. Called between two steps, after the new live weights are
        installed. `wait`: return only once the memory is free.
        """
        if self._networks:
            self._freeing.give(partial(let_go, self._networks))
            self._networks = []
        for folders in self._folders:
            assert self._spool is not None
            self._settling.give(partial(self._spool.settle, folders))
        self._folders.clear()
        if wait:
            self._freeing.mark().wait()

    def ends(self) -> list[threading.Event]:
        """Return events that are set once all work submitted so far is done."""
        return [self._freeing.mark(), self._settling.mark()]
