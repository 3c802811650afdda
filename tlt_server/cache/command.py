"""The command `tlt cache`: prints what was moved, or what there is. Every failure ends in one line
with its remedy.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path

from rich.console import Console

from tlt_server.cache.archive import Moved, export, import_
from tlt_server.engine.gpu.kernel_records import KernelRecord, cache_directory, records, toolchain
from tlt_server.engine.knowledge_file import profile_in
from tlt_server.errors import StartupError

MIB = 2**20


def run(arguments: argparse.Namespace) -> int:
    console = Console(soft_wrap=True, highlight=False, markup=False)
    cache = cache_directory()
    try:
        VERBS[arguments.verb](arguments, cache, toolchain(), console)
    except OSError as error:
        raise StartupError(
            f"{error.filename or cache} cannot be used: {error.strerror}; TRITON_CACHE_DIR and "
            "--state-dir must be directories that this user may write to"
        ) from error
    return 0


def _export(
    arguments: argparse.Namespace, cache: Path, here: Mapping[str, str], console: Console
) -> None:
    moved = export(arguments.file, cache, here, arguments.state_dir)
    console.print(f"wrote {arguments.file}: {_described(moved)}")
    console.print(f"made with: {made_with(here)}")


def _import(
    arguments: argparse.Namespace, cache: Path, here: Mapping[str, str], console: Console
) -> None:
    moved = import_(arguments.file, cache, here, arguments.state_dir)
    console.print(f"{cache} has the kernels of {arguments.file}: {_described(moved)}")


def _described(moved: Moved) -> str:
    profile = "with" if moved.profile else "without"
    return (
        f"{moved.kernels} kernels of {moved.starts} different starts, {moved.bytes / MIB:.1f} MiB, "
        f"{profile} measured step times"
    )


def _show(
    arguments: argparse.Namespace, cache: Path, here: Mapping[str, str], console: Console
) -> None:
    found = [*records(cache)]
    entries = {kernel.entry for record in found for kernel in record.kernels}
    ours = sum(_bytes(cache / entry) for entry in entries)
    console.print(
        f"{cache}: {len(entries)} kernels of {len(found)} different starts, {ours / MIB:.1f} MiB"
    )
    for record in found:
        console.print(f"  {_start(record, cache, here)}")
    console.print(f"here: {made_with(here)}")
    console.print(f"step times: {profile_in(arguments.state_dir)}")


def _start(record: KernelRecord, cache: Path, here: Mapping[str, str]) -> str:
    differing = {name: record.toolchain.get(name, "") for name in here}
    differing = {name: made for name, made in differing.items() if made != here[name]}
    state = (
        f"of no use here: made with {made_with(differing)}"
        if differing
        else "some are missing, and will be compiled"
        if not record.complete(cache)
        else "a server has started with them"
        if record.started
        else "imported"
    )
    return f"{len(record.kernels)} kernels of start {record.engine}: {state}"


def made_with(toolchain: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in toolchain.items() if value)


def _bytes(entry: Path) -> int:
    return sum(path.stat().st_size for path in entry.glob("*"))


VERBS: dict[str, Callable[[argparse.Namespace, Path, Mapping[str, str], Console], None]] = {
    "export": _export,
    "import": _import,
    "show": _show,
}
