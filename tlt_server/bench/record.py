"""The output of a bench: one line of JSON, the last on stdout, and with `--json` a file that adds
command, commit, machine and versions.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from tlt_server.process.machine import processor

PACKAGES = ("torch", "triton", "transformers", "numba", "numpy")
DRIVER = Path("/proc/driver/nvidia/version")


def wide_console() -> Console:
    """Return the terminal, or a console of 150 columns if output goes to a file."""
    console = Console()
    return console if console.is_terminal else Console(width=150)


class StillProgress(Progress):
    """Progress that is drawn only on updates: a thread that redraws would take the interpreter from
    the timed code. If output goes to a file, each description becomes a line of its own, so that an
    interrupted run shows its progress.
    """

    def update(self, task_id: TaskID, **change: Any) -> None:
        before = self._tasks[task_id].description
        super().update(task_id, refresh=True, **change)
        task = self._tasks[task_id]
        if task.description != before and not self.console.is_terminal:
            line = f"[{task.elapsed or 0:.1f} s] {task.completed:g}/{task.total:g} "
            print(f"{line}{task.description}", flush=True)


def progress_bar(console: Console) -> Progress:
    return StillProgress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
        console=console,
        auto_refresh=False,
    )


@contextmanager
def steps(console: Console, total: int, first: str = "load") -> Iterator[Callable[[str], None]]:
    """Show a bar; yield the function that advances it by one step and names the next one."""
    with progress_bar(console) as progress:
        task = progress.add_task(first, total=total)
        yield lambda name: progress.update(task, advance=1, description=name)


def finish(args: argparse.Namespace, figures: Mapping[str, Any], **how: Any) -> None:
    """Print the figures as one line of JSON, and `save` them."""
    print(msgspec.json.encode(figures).decode(), flush=True)
    save(args, figures, **how)


def save(
    args: argparse.Namespace,
    figures: Mapping[str, Any],
    *,
    on_gpu: bool | None = None,
    recorded_on: str = "",
    program: str = "tlt",
) -> None:
    """Write the file of `--json`, if requested; a long bench does so before its end. on_gpu:
    whether GPUs were used; None: by `--device`. recorded_on: the machine of the recorded rollout,
    if it is not this one.
    """
    if args.json:
        on_gpu = args.device == "cuda" if on_gpu is None else on_gpu
        command = f"{program} {shlex.join(without_folder(argument) for argument in sys.argv[1:])}"
        entry = entry_of(figures, command, on_gpu=on_gpu, commit=args.commit)
        write_entry(args.json, entry | ({"machine": recorded_on} if recorded_on else {}))


def without_folder(argument: str) -> str:
    """Return the argument; of a path, only its end: a machine's folders help no reader."""
    return f".../{Path(argument).name}" if argument.startswith("/") else argument


def entry_of(
    figures: Mapping[str, Any], command: str, *, on_gpu: bool, commit: str | None = None
) -> dict[str, Any]:
    """Return the figures with everything needed to measure them again."""
    return {
        "command": command,
        "commit": commit or commit_here(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": machine(on_gpu=on_gpu),
        "versions": versions(on_gpu=on_gpu),
        "figures": figures,
    }


def write_entry(file: Path, entry: Mapping[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(msgspec.json.format(msgspec.json.encode(entry), indent=1) + b"\n")


def machine(*, on_gpu: bool) -> str:
    """Describe the machine, with its GPUs only if they were used."""
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    host = f"{cores} cores of {processor()}, {memory:.0f} GiB, {platform.system()}"
    return f"{_gpus()}; {host}" if on_gpu else host


def versions(*, on_gpu: bool) -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if on_gpu:
        import torch

        found |= {"cuda": torch.version.cuda or "none", "driver": _driver()}
    return found


def commit_here() -> str:
    """Return the commit of this code's directory: `unknown` outside a repository, with a `+` for
    uncommitted changes except results.
    """
    git = ["git", "-C", str(Path(__file__).parents[2])]
    files = (":/", ":(exclude,top)benchmarks/results")
    name = _output_of([*git, "rev-parse", "--short", "HEAD"])
    changed = _output_of([*git, "status", "--porcelain", "--untracked-files=no", "--", *files])
    return name + "+" * bool(changed) if name else "unknown"


def _gpus() -> str:
    import torch

    if not torch.cuda.is_available():
        return "no GPU"
    kinds = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return f"{len(kinds)} x {kinds[0].name} ({kinds[0].total_memory / 2**30:.0f} GiB)"


def _driver() -> str:
    if DRIVER.exists() and (found := re.search(r"\b(\d+\.\d+(\.\d+)?)\b", DRIVER.read_text())):
        return found[1]
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return _output_of(asked).partition("\n")[0] or "unknown"


def _output_of(command: list[str]) -> str:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=20, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
