"""The archive of compiled kernels: a tar file of plain files, first a manifest with checksums.

It has the program and the description of each of Triton's entries. The file that lists both has
absolute paths, so an import writes its own. Names, sizes and checksums are checked before anything
is where Triton looks.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, NamedTuple

import msgspec
from msgspec import Struct

from tlt_server.engine.gpu.kernel_records import (
    FOLDER,
    KernelRecord,
    entry_name,
    records,
    write_record,
)
from tlt_server.errors import StartupError
from tlt_server.private import private_directory, private_file

MANIFEST = "manifest.json"
PROFILE = "knowledge.json"
FORMAT = 1
MAX_FILES = 20_000
MAX_FILE_BYTES = 64 * 2**20
MAX_BYTES = 2**30
# Triton's lists of files (`__grp__`) hold paths, so an archive has none.
KERNEL_NAME = re.compile(r"kernels/([A-Z2-7]{52})/((?!__grp__)\w{1,150}\.(?:json|cubin))", re.ASCII)
RECORD_NAME = re.compile(r"records/[0-9a-f]{32}\.json")
UNREADABLE = (ValueError, RecursionError)  # errors of JSON that is damaged or nested too deeply


class ArchiveManifest(Struct, frozen=True, forbid_unknown_fields=True):
    format: int
    toolchain: dict[str, str]
    sha256: dict[str, str]  # by name


class _Description(Struct, frozen=True):
    """A field of what Triton writes about a kernel."""

    hash: str


class Moved(NamedTuple):
    kernels: int
    starts: int  # records: engines that find all of their kernels
    bytes: int
    profile: bool  # measured step times


class Refused(StartupError):
    """The archive cannot be used; nothing was changed."""


def export(
    file: Path, cache: Path, toolchain: Mapping[str, str], state: Path | None = None
) -> Moved:
    """Write the kernels of all recorded starts of this toolchain, and a profile of step times."""
    found = [
        record
        for record in records(cache)
        if record.toolchain == toolchain and record.complete(cache)
    ]
    if not found:
        raise StartupError(
            f"{cache} has no kernels of a start with this GPU and these versions; start tlt serve "
            "here once, until it is ready, and export then"
        )
    contents = {
        f"records/{record.name}": msgspec.json.encode(
            msgspec.structs.replace(record, started=False)
        )
        for record in found
    }
    entries = sorted({kernel.entry for record in found for kernel in record.kernels})
    for entry in entries:
        for path in sorted((cache / entry).iterdir()):
            name = f"kernels/{entry}/{path.name}"
            if KERNEL_NAME.fullmatch(name):
                contents[name] = path.read_bytes()
    profile = state is not None and (state / PROFILE).exists()
    if state is not None and profile:
        contents[PROFILE] = (state / PROFILE).read_bytes()
    manifest = ArchiveManifest(
        FORMAT,
        dict(toolchain),
        {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()},
    )
    _write(file, {MANIFEST: msgspec.json.encode(manifest), **contents})
    return Moved(len(entries), len(found), file.stat().st_size, profile)


def import_(
    file: Path, cache: Path, toolchain: Mapping[str, str], state: Path | None = None
) -> Moved:
    """Take an archive's kernels, and its profile where the state directory has none. `Refused`
    names what is wrong.
    """
    for directory in (cache / FOLDER, *([state] if state is not None else ())):
        private_directory(directory, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="import-", dir=cache / FOLDER) as directory:
        staged = Path(directory)
        names = _unpack(file, staged, toolchain)
        found = [_record(file, staged / name, toolchain) for name in names if _is_record(name)]
        entries = sorted({name.split("/")[1] for name in names if name.startswith("kernels/")})
        for entry in entries:
            _complete(file, staged / "kernels" / entry, cache / entry)
        missing = {kernel.entry for record in found for kernel in record.kernels} - {*entries}
        if missing:
            raise Refused(f"{file} lacks the kernel {min(missing)}, which it lists")
        for entry in entries:
            _move(staged / "kernels" / entry, cache / entry)
        known = {record.name for record in records(cache)}
        for record in found:
            if record.name not in known:
                write_record(cache, record)
        profile = state is not None and PROFILE in names and not (state / PROFILE).exists()
        if state is not None and profile:
            shutil.copyfile(staged / PROFILE, state / f"{PROFILE}.import")
            os.replace(state / f"{PROFILE}.import", state / PROFILE)
        return Moved(len(entries), len(found), file.stat().st_size, profile)


def _write(file: Path, contents: Mapping[str, bytes]) -> None:
    draft = file.with_name(f".{file.name}.new{os.getpid()}")
    try:
        with (
            open(draft, "wb", opener=private_file) as out,
            tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as archive,
        ):
            for name, content in contents.items():
                member = tarfile.TarInfo(name)
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
        os.replace(draft, file)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise StartupError(
            f"{file} cannot be written: {error.strerror}; name a file in a directory that exists "
            "and has room"
        ) from None


def _unpack(file: Path, staged: Path, toolchain: Mapping[str, str]) -> list[str]:
    """Write the archive's files, checked, below an empty directory; return their names."""
    try:
        if file.stat().st_size > MAX_BYTES:
            raise Refused(f"{file} has more than {MAX_BYTES} bytes, so it is no archive of kernels")
        with tarfile.open(file, "r:") as archive:
            members = _members(file, archive)
            manifest = _manifest(file, members)
            _check_toolchain(file, manifest.toolchain, toolchain)
            names = [_store(file, name, content, manifest, staged) for name, content in members]
    except (OSError, tarfile.TarError, ValueError) as error:
        raise Refused(
            f"{file} cannot be read as an archive of tlt cache export: {error}; export it again"
        ) from None
    missing = manifest.sha256.keys() - {*names}
    if missing:
        raise Refused(f"{file} lacks {min(missing)}; it is incomplete: copy or export it again")
    return names


def _members(file: Path, archive: tarfile.TarFile) -> Iterator[tuple[str, IO[bytes]]]:
    """Yield name and content of each member, none of which is anything but a plain file."""
    for number, member in enumerate(archive):
        shown = member.name[:200]
        # Extended headers can declare holes, which take no room here but do where they are read.
        if member.type != tarfile.REGTYPE or member.pax_headers:
            raise Refused(f"{file} has {shown!r}, which is no plain file; nothing was taken")
        if number >= MAX_FILES or member.size > MAX_FILE_BYTES:
            raise Refused(
                f"{file} has {shown!r}, with which it exceeds {MAX_FILES} files or "
                f"{MAX_FILE_BYTES} bytes of one; nothing was taken"
            )
        content = archive.extractfile(member)
        assert content is not None
        yield member.name, content


def _manifest(file: Path, members: Iterator[tuple[str, IO[bytes]]]) -> ArchiveManifest:
    name, content = next(members, ("", io.BytesIO()))
    if name != MANIFEST:
        raise Refused(
            f"{file} does not begin with {MANIFEST}; give an archive that tlt cache export wrote"
        )
    try:
        manifest = msgspec.json.decode(content.read(), type=ArchiveManifest)
    except UNREADABLE as error:
        raise Refused(f"{file}: {MANIFEST} cannot be read: {error}; export it again") from None
    if manifest.format != FORMAT:
        raise Refused(
            f"{file} has format {manifest.format}, and this version reads {FORMAT}; export it with "
            "the version that is installed here"
        )
    return manifest


def _check_toolchain(file: Path, made: Mapping[str, str], here: Mapping[str, str]) -> None:
    differing = [
        f"{name} {made.get(name, 'unknown')[:100]!r}, here {value!r}"
        for name, value in here.items()
        if made.get(name) != value
    ]
    if differing:
        raise Refused(
            f"{file} was made with {'; '.join(differing)}. Its kernels would not be used: export "
            "them on a machine like this one, or start tlt serve, which compiles its own"
        )


def _store(
    file: Path, name: str, content: IO[bytes], manifest: ArchiveManifest, staged: Path
) -> str:
    """Write one file if it is named and has content as it must."""
    if not (KERNEL_NAME.fullmatch(name) or _is_record(name) or name == PROFILE):
        raise Refused(f"{file} has {name[:200]!r}, which no archive of kernels has")
    data = content.read()
    if hashlib.sha256(data).hexdigest() != manifest.sha256.get(name):
        raise Refused(
            f"{file}: {name} does not have the checksum of the manifest; copy or export it again"
        )
    path = staged / name
    private_directory(path.parent, parents=True, exist_ok=True)
    with open(path, "xb", opener=private_file) as out:
        out.write(data)
    return name


def _is_record(name: str) -> bool:
    return RECORD_NAME.fullmatch(name) is not None


def _record(file: Path, path: Path, toolchain: Mapping[str, str]) -> KernelRecord:
    try:
        record = msgspec.json.decode(path.read_bytes(), type=KernelRecord)
    except UNREADABLE as error:
        raise Refused(f"{file}: records/{path.name} cannot be read: {error}") from None
    if record.name != path.name or record.toolchain != toolchain or record.started:
        raise Refused(f"{file}: records/{path.name} is not the record that its name says")
    return record


def _complete(file: Path, staged: Path, entry: Path) -> None:
    """Check an entry of Triton's cache, and write its list of files as they will lie."""
    described = sorted(path for path in staged.iterdir() if path.suffix == ".json")
    try:
        [description] = described
        digest = msgspec.json.decode(description.read_bytes(), type=_Description).hash
        if entry_name(digest) != entry.name or not description.with_suffix(".cubin").exists():
            raise ValueError("its hash is another's, or it has no program")
    except UNREADABLE as error:
        raise Refused(f"{file}: kernels/{entry.name} is no kernel of Triton's: {error}") from None
    paths = {path.name: str(entry / path.name) for path in sorted(staged.iterdir())}
    with open(staged / f"__grp__{description.name}", "xb", opener=private_file) as out:
        out.write(json.dumps({"child_paths": paths}).encode())


def _move(staged: Path, entry: Path) -> None:
    """Move an entry to where Triton looks. It reads the list of files first, so that comes last."""
    if any(entry.glob("__grp__*.json")):
        return  # it has this kernel
    private_directory(entry, exist_ok=True)
    for path in sorted(staged.iterdir(), key=lambda path: path.name.startswith("__grp__")):
        os.replace(path, entry / path.name)
