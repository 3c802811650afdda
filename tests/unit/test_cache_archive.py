"""`tlt cache`: kernels come back as they went, from anywhere to anywhere; what could do harm or
would not be used is refused by name, and then nothing has changed.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from tlt_server.cache import archive, command
from tlt_server.cache.archive import ArchiveManifest, Refused, export, import_
from tlt_server.engine.gpu.kernel_records import (
    FOLDER,
    KernelRecord,
    RecordedKernel,
    entry_name,
    read_record,
    records,
    write_record,
)
from tlt_server.errors import StartupError

HERE = {"gpu": "NVIDIA H200", "torch": "2.13.0", "triton": "3.7.1 (ab)", "kernels": "0123"}
DIGEST = hashlib.sha256(b"grow").hexdigest()
ENTRY = entry_name(DIGEST)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache in which one engine has started with one kernel; another kernel is not ours."""
    cache = tmp_path / "cache"
    for entry in (ENTRY, entry_name(hashlib.sha256(b"other").hexdigest())):
        (cache / entry).mkdir(parents=True)
    contents = {
        "_grow.json": json.dumps({"hash": DIGEST, "shared": 0}),
        "_grow.cubin": "\x00program",
    }
    for name, content in {**contents, "_grow.ptx": "text"}.items():
        (cache / ENTRY / name).write_text(content)
    paths = {name: str(cache / ENTRY / name) for name in contents}
    (cache / ENTRY / "__grp___grow.json").write_text(json.dumps({"child_paths": paths}))
    kernel = RecordedKernel("tlt_kernels.gpu.growth", "_grow", "{}", ENTRY)
    write_record(cache, KernelRecord(HERE, "engine", True, (kernel,)))
    return cache


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_kernels_and_step_times_come_back_where_another_cache_is(
    cache: Path, tmp_path: Path
) -> None:
    state, other, taken = tmp_path / "state", tmp_path / "other" / "cache", tmp_path / "taken"
    state.mkdir()
    (state / "knowledge.json").write_text("{}")
    wrote = export(tmp_path / "x.tar", cache, HERE, state)
    assert (wrote.kernels, wrote.starts, wrote.profile) == (1, 1, True)

    assert import_(tmp_path / "x.tar", other, HERE, taken) == wrote
    assert {path.name for path in other.iterdir()} == {FOLDER, ENTRY}
    for name in ("_grow.json", "_grow.cubin"):
        assert (other / ENTRY / name).read_bytes() == (cache / ENTRY / name).read_bytes()
    group = json.loads((other / ENTRY / "__grp___grow.json").read_text())["child_paths"]
    assert group == {name: str(other / ENTRY / name) for name in ("_grow.json", "_grow.cubin")}
    [record], [before] = records(other), records(cache)
    assert record == msgspec.structs.replace(before, started=False) and record.complete(other)
    assert (taken / "knowledge.json").read_text() == "{}"

    (taken / "knowledge.json").write_text("its own")
    assert not import_(tmp_path / "x.tar", other, HERE, taken).profile
    assert (taken / "knowledge.json").read_text() == "its own"


def test_an_import_keeps_what_a_server_has_started_with(cache: Path, tmp_path: Path) -> None:
    export(tmp_path / "x.tar", cache, HERE)
    before = files(cache)
    import_(tmp_path / "x.tar", cache, HERE)
    assert files(cache) == before


def test_half_an_entry_is_made_whole(cache: Path, tmp_path: Path) -> None:
    export(tmp_path / "x.tar", cache, HERE)
    (cache / ENTRY / "__grp___grow.json").unlink()
    assert not next(records(cache)).complete(cache)
    import_(tmp_path / "x.tar", cache, HERE)
    assert next(records(cache)).complete(cache)


@pytest.mark.parametrize("name", [*HERE])
def test_kernels_of_another_kind_of_machine_are_refused(
    name: str, cache: Path, tmp_path: Path
) -> None:
    export(tmp_path / "x.tar", cache, HERE)
    with pytest.raises(Refused, match=rf"{name} '.*', here 'another'.*start tlt serve"):
        import_(tmp_path / "x.tar", tmp_path / "new", {**HERE, name: "another"})
    assert files(tmp_path / "new") == {}


def test_without_a_start_there_is_nothing_to_export(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="start tlt serve here once"):
        export(tmp_path / "x.tar", cache, {**HERE, "gpu": "another"})
    (cache / ENTRY / "__grp___grow.json").unlink()
    with pytest.raises(StartupError, match="start tlt serve here once"):
        export(tmp_path / "x.tar", cache, HERE)
    assert not (tmp_path / "x.tar").exists()


Change = Callable[[list[tuple[tarfile.TarInfo, bytes]]], None]


def changed(file: Path, change: Change, *, sums: bool = True) -> Path:
    """Rewrite an archive; with `sums`, its manifest has the checksums of what is in it then."""
    with tarfile.open(file) as old:
        members = [(member, old.extractfile(member).read()) for member in old]  # type: ignore[union-attr]
    change(members)
    if sums:
        manifest = msgspec.json.decode(members[0][1], type=ArchiveManifest)
        sha256 = {member.name: hashlib.sha256(data).hexdigest() for member, data in members[1:]}
        members[0] = (
            members[0][0],
            msgspec.json.encode(msgspec.structs.replace(manifest, sha256=sha256)),
        )
    with tarfile.open(file, "w") as new:
        for member, data in members:
            member.size = len(data)
            new.addfile(member, io.BytesIO(data))
    return file


def named(name: str) -> Change:
    return lambda members: members.append((tarfile.TarInfo(name), b"x"))


def link(members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    member = tarfile.TarInfo(f"kernels/{ENTRY}/_link.cubin")
    member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
    members.append((member, b""))


def folder(members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    member = tarfile.TarInfo("kernels")
    member.type = tarfile.DIRTYPE
    members.append((member, b""))


def holes(members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    """Declare a file of 1 MiB that takes no room in the archive."""
    member = tarfile.TarInfo(f"kernels/{ENTRY}/_grow.ptx.json")
    member.pax_headers = {"GNU.sparse.map": "0,0", "GNU.sparse.size": str(2**20)}
    members.append((member, b""))


def no_number(members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    member = tarfile.TarInfo(f"kernels/{ENTRY}/_other.cubin")
    member.pax_headers = {"GNU.sparse.size": "x"}
    members.append((member, b""))


def replaced(end: str, data: bytes) -> Change:
    def change(members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
        [at] = [i for i, (member, _) in enumerate(members) if member.name.endswith(end)]
        members[at] = members[at][0], data

    return change


def without(end: str) -> Change:
    def change(members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
        members[:] = [pair for pair in members if not pair[0].name.endswith(end)]

    return change


def foreign(members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    """Put the kernel under a name that is another's."""
    for member, _ in members:
        member.name = member.name.replace(ENTRY, "A" * 52)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (named(f"kernels/{ENTRY}/../../escaped.cubin"), "which no archive of kernels has"),
        (named("/tmp/escaped.cubin"), "which no archive of kernels has"),
        (named(f"kernels/{ENTRY}/__triton_launcher.so"), "which no archive of kernels has"),
        (link, "no plain file"),
        (folder, "no plain file"),
        (holes, "no plain file"),
        (no_number, "cannot be read as an archive"),
        (named(f"kernels/{ENTRY}/__grp___other.json"), "which no archive of kernels has"),
        (replaced("_grow.json", b"{}"), "no kernel of Triton's"),
        (replaced("_grow.json", b'{"x": ' + b"[" * 10**5), "no kernel of Triton's"),
        (without("_grow.json"), "no kernel of Triton's"),
        (without("_grow.cubin"), "has no program"),
        (foreign, "its hash is another's"),
    ],
)
def test_what_no_export_writes_is_refused(
    change: Change, says: str, cache: Path, tmp_path: Path
) -> None:
    export(tmp_path / "x.tar", cache, HERE)
    file = changed(tmp_path / "x.tar", change)
    with pytest.raises(Refused, match=says):
        import_(file, tmp_path / "new", HERE)
    assert files(tmp_path / "new") == {} and files(tmp_path).keys().isdisjoint({"escaped.cubin"})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (replaced(".cubin", b"another"), "_grow.cubin does not have the checksum"),
        (without(".cubin"), "lacks kernels/"),
        (without("manifest.json"), "does not begin with manifest.json"),
        (replaced("manifest.json", b'{"format": 1}'), "manifest.json cannot be read"),
        (replaced("manifest.json", b'{"\xff": 1}'), "manifest.json cannot be read"),
    ],
)
def test_what_was_changed_on_the_way_is_named(
    change: Change, says: str, cache: Path, tmp_path: Path
) -> None:
    export(tmp_path / "x.tar", cache, HERE)
    file = changed(tmp_path / "x.tar", change, sums=False)
    with pytest.raises(Refused, match=says):
        import_(file, tmp_path / "new", HERE)
    assert files(tmp_path / "new") == {}


def test_a_record_that_lists_more_than_there_is_is_refused(cache: Path, tmp_path: Path) -> None:
    export(tmp_path / "x.tar", cache, HERE)
    [record] = records(cache)
    more = (*record.kernels, RecordedKernel("m", "k", "{}", "B" * 52))
    data = msgspec.json.encode(msgspec.structs.replace(record, started=False, kernels=more))
    with pytest.raises(Refused, match="lacks the kernel B"):
        import_(changed(tmp_path / "x.tar", replaced(record.name, data)), tmp_path / "new", HERE)


def test_size_and_count_are_bounded(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export(tmp_path / "x.tar", cache, HERE)
    for bound, most, says in (
        ("MAX_FILE_BYTES", 4, "exceeds"),
        ("MAX_FILES", 2, "exceeds 2 files"),
        ("MAX_BYTES", 100, "more than 100 bytes"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(archive, bound, most)
            with pytest.raises(Refused, match=says):
                import_(tmp_path / "x.tar", tmp_path / "new", HERE)


@pytest.mark.parametrize("content", [b"", b"no tar file" * 100, None])
def test_no_archive_is_refused(content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "x.tar").write_bytes(content)
    with pytest.raises(Refused, match=r"x\.tar"):
        import_(tmp_path / "x.tar", tmp_path / "new", HERE)


@pytest.mark.parametrize("state", ["x.tar", "x.tar/state"])
def test_a_directory_that_cannot_be_made_is_named(
    state: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export(tmp_path / "x.tar", cache, HERE)
    monkeypatch.setattr(command, "cache_directory", lambda: tmp_path / "new")
    monkeypatch.setattr(command, "toolchain", lambda: HERE)
    given = argparse.Namespace(verb="import", file=tmp_path / "x.tar", state_dir=tmp_path / state)
    with pytest.raises(StartupError, match=r"x\.tar.* cannot be used: .*--state-dir"):
        command.run(given)
    assert files(tmp_path / "new") == {}


def test_a_damaged_or_foreign_record_is_named_and_not_used(
    cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    [record] = records(cache)
    path = cache / FOLDER / record.name
    path.rename(path.with_name(f"{'0' * 32}.json"))
    assert read_record(cache, f"{'0' * 32}.json") is None
    assert "is not used, and made again" in capfd.readouterr().err
    path.write_bytes(b"{")
    assert [*records(cache)] == [] and "is not used" in capfd.readouterr().err
