"""Restores, at start, the versions in the spool that were live when the last engine ended: bit for
bit or not at all.

If a version is lost, its name is reported and the model directory's weights take its place. The
frontend serves nothing from them until a push replaces them.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import NamedTuple

from tlt_client.channels import Intake
from tlt_client.channels.disk import DiskReceiver
from tlt_server.errors import StartupError, TltError
from tlt_server.weights.candidate import Candidate
from tlt_server.weights.parts import Changed, Drafter, Live, Target
from tlt_server.weights.spool import Spool
from tlt_server.weights.storage import Options
from tlt_server.wire.commands import Manifest, Role
from tlt_server.wire.kept import KeptVersion


class Restored(NamedTuple):
    live: Live
    lost: dict[str, str]  # role -> which version, and why


def restore(spool: Spool, started: Live, options: Options) -> Restored:
    """Replace the weights in `started`, read from the model directories, by the last committed ones
    if the spool has them, and add the adapters that were loaded. A version that cannot be restored
    or does not fit is named and not loaded, so requests for it are rejected.
    """
    options = replace(options, spool=None, storage=Options().storage)  # what is kept is read only
    live, lost = started, {}
    for role, kept in spool.current().items():
        if role not in started.by_role:
            continue  # the server has no drafter this time
        try:
            live = _restored(role, kept, spool, live, options)
        except TltError as error:
            spool.lose(role, kept)
            lost[role] = (
                f"the committed weight version {kept.version!r} of the {role} is lost: "
                f"{error.message}; restore {spool.directory} and restart"
            )
    for name, kept in spool.adapters.items():
        try:
            if len(live.adapters) >= options.max_loras:
                raise StartupError(
                    f"--max-loras is {options.max_loras}; restart with more, as the next push "
                    "forgets it"
                )
            live = _with_adapter(name, kept, spool, live, options)
        except TltError as error:
            print(f"tlt: adapter {name!r} is not loaded again: {error.message}", file=sys.stderr)
    spool.sweep()
    return Restored(live, lost)


def _with_adapter(name: str, kept: KeptVersion, spool: Spool, live: Live, options: Options) -> Live:
    path = kept.directory or "none"
    manifest = Manifest(role="adapter", adapter=name, version=kept.version, path=path)
    adapter = _read(manifest, spool, live, options).adapter
    assert adapter is not None
    if adapter.digest != kept.digest:
        raise StartupError(f"the content of {kept.directory} has changed")
    return live.updated(Changed(adapter=replace(adapter, slot=len(live.adapters))))


def _restored(role: str, kept: KeptVersion, spool: Spool, live: Live, options: Options) -> Live:
    part: Target | Drafter
    if kept.directory:
        whose: Role = "target" if role == "target" else "drafter"
        manifest = Manifest(role=whose, version=kept.version, path=kept.directory)
        changed = _read(manifest, spool, live.complete(), options)
        part = live.updated(changed).by_role[role]
    else:
        part = replace(live.complete().by_role[role], version=kept.version)
    if part.digest != kept.digest:
        where = kept.directory or "the model directory"
        raise StartupError(
            f"the content of {where} has changed (digest {part.digest[:12]}, committed was "
            f"{kept.digest[:12]})"
        )
    return live.updated(Changed(target=part) if isinstance(part, Target) else Changed(drafter=part))


def _read(manifest: Manifest, spool: Spool, live: Live, options: Options) -> Changed:
    intake = Intake(root=spool.directory)
    changed = Candidate(options).take(
        manifest, live, lambda m: DiskReceiver(m, intake), lambda phase: None
    )
    assert changed is not None, "one manifest brings all"
    return changed
