"""Files and directories of weights, spool and state have their own modes under any umask."""

from __future__ import annotations

import asyncio
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tlt_client.channels.disk import DiskSender
from tlt_client.channels.line import made_directory
from tlt_server.errors import PushFailed
from tlt_server.frontend.rollouts.journal import Journal
from tlt_server.frontend.weights.uploads import Uploads
from tlt_server.process.private import private_directory
from tlt_server.weights.candidate import _exhausted
from tlt_server.weights.spool import Spool
from tlt_server.weights.storage import _mapped, ran_out
from tlt_server.wire.kept import StartedFile


@pytest.fixture(params=[0o000, 0o022, 0o777], ids="umask {:03o}".format)
def _umask(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[None]:
    tmp_path.mkdir(exist_ok=True)
    before = os.umask(request.param)
    yield
    os.umask(before)


def modes(root: Path) -> dict[str, set[int]]:
    """Return the modes of all directories and of all files below `root`, `root` included."""
    found: dict[str, set[int]] = {"directories": set(), "files": set()}
    for path in [root, *root.rglob("*")]:
        kind = "directories" if path.is_dir() else "files"
        found[kind].add(stat.S_IMODE(path.stat().st_mode))
    return found


@pytest.mark.usefixtures("_umask")
def test_server_files_are_readable_only_by_the_servers_user(tmp_path: Path) -> None:
    state = tmp_path / "above" / "state"
    spool = Spool(state, "model")
    spool.begin()
    spool.keep("target", "model.safetensors", [b"bytes"])
    spool.keep("target", "config.json", [b"{}"])
    live: Any = SimpleNamespace(by_role={}, adapters={})
    spool.prepare(live, live)
    spool.commit()
    assert spool.current() == {}
    Journal(private_directory(state / "rollouts") / "r.journal").close()
    StartedFile(private_directory(state / "1")).note(["a"])
    assert _mapped(state, (3,), torch.int8).shape == (3,)
    made_directory(state)
    asyncio.run(upload(state))
    assert modes(state) == {"directories": {0o700}, "files": {0o600}}
    assert len([path for path in state.rglob("*") if path.is_file()]) == 6


async def upload(state: Path) -> None:
    config: Any = SimpleNamespace(
        state_dir=state,
        max_uploads=2,
        max_upload_parts=2,
        max_upload_mb=1,
        upload_ttl_s=60.0,
        body_timeout_s=5.0,
    )

    async def chunks() -> Any:
        yield b"1234"

    await Uploads(config).write("v", "p.safetensors", 0, 4, chunks())


@pytest.mark.usefixtures("_umask")
def test_handed_over_weights_are_read_only_to_other_users(tmp_path: Path) -> None:
    found: list[dict[str, set[int]]] = []

    def push(version: str, path: str, **fields: Any) -> dict[str, Any]:
        found.append(modes(Path(path).parent))
        return {}

    client: Any = SimpleNamespace(push_weights=push)
    tensors = {"a": torch.zeros(4), "b": torch.zeros(4)}
    for size in (8, 2**20):  # with an index, and one file
        DiskSender(client, tmp_path / "root", max_file_bytes=size).push(tensors, "v1")
    assert found == [{"directories": {0o755}, "files": {0o644}}] * 2


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_full_disk_error_names_the_disk_not_memory(code: int) -> None:
    error = OSError(code, os.strerror(code))
    assert ran_out(error)
    failed = _exhausted(error)
    assert isinstance(failed, PushFailed) and failed.message.startswith("a disk is full: ")
    assert "--state-dir" in failed.message and "memory" not in failed.message
    ran_dry = _exhausted(OSError(errno.ENOMEM, "no")).message
    assert ran_dry.startswith("memory ran out")
    assert ran_dry.endswith("or, on one rank, with --weight-staging host or disk"), (
        "several ranks refuse these"
    )
