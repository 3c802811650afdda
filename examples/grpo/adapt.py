"""The adaptive drafter of a run: between two steps it is trained on what the last ones have said,
and pushed.

A drafter changes no token, so nothing here needs to be repeatable. Drafters are kept below
`drafters/` by the step that they were trained after, and a resumed run goes on with the newest.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from pathlib import Path

from torch import nn

from examples.grpo.record import RunDirectory
from tlt_client import Client
from tlt_client.channels.http import HttpSender

STARTS = ("given", "none")


class AdaptiveDrafter:
    def __init__(self, run: RunDirectory, asked: argparse.Namespace) -> None:
        self._run, self._asked = run, asked
        self._drafters = run.path / "drafters"

    def push_newest(self, client: Client) -> float:
        """Push the newest drafter of the run, if it has trained one; return the seconds."""
        kept = sorted(self._drafters.glob("[0-9]*")) if self._drafters.is_dir() else []
        kept = [directory for directory in kept if int(directory.name) <= self._run.steps]
        return self._push(client, kept[-1]) if kept else 0.0

    def adapt(self, client: Client, policy: nn.Module) -> tuple[float, float]:
        """Train on the last steps' responses with the states of the policy as it is now, and push;
        return the seconds of both. `CalledProcessError`: `tlt drafter train` failed.
        """
        run, asked, started_s = self._run, self._asked, time.perf_counter()
        target, partial = run.path / "adapting", self._drafters / "partial"
        run.write_model(policy, asked.model, target)
        self._drafters.mkdir(exist_ok=True)
        kept = sorted(self._drafters.glob("[0-9]*"))
        shutil.rmtree(partial, ignore_errors=True)
        segments = sorted((run.path / "responses").glob("*.segment"))[-asked.drafter_window :]
        command = [sys.executable, "-m", "tlt_server", "drafter", "train"]
        command += ["--target", str(target), "--drafter", str(kept[-1] if kept else asked.drafter)]
        command += ["--data", *map(str, segments), "--out", str(partial)]
        command += ["--steps", str(asked.drafter_steps), "--lr", str(asked.drafter_lr)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        directory = self._drafters / f"{run.steps + 1:05}"
        shutil.rmtree(directory, ignore_errors=True)
        partial.rename(directory)
        trained_s = time.perf_counter() - started_s
        for old in kept[:-1]:
            shutil.rmtree(old)
        return trained_s, self._push(client, directory)

    def _push(self, client: Client, directory: Path) -> float:
        started_s = time.perf_counter()
        version = f"{self._run.path.name}-drafter-{int(directory.name)}"
        HttpSender(client).push_directory(directory, version, role="drafter")
        return time.perf_counter() - started_s


def untrained(model: Path, directory: Path) -> Path:
    """Write a drafter that was never trained, unless it is there, and return its directory."""
    if not (directory / "config.json").exists():
        command = [sys.executable, "-m", "tlt_server", "drafter", "init", "--target", str(model)]
        subprocess.run([*command, "--out", str(directory)], check=True, stdout=subprocess.DEVNULL)
    return directory
