"""The drafter of a run, which follows the policy: not at all, by `tlt drafter train` between two
steps, or by the server's own trainer while the policy is updated.

A drafter changes no token, so nothing here needs to be repeatable. `drafters/00010/` is the drafter
from step 10 on, counted from 0, and a resumed run continues with the newest.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from torch import nn

from examples.grpo.pushes import Pushes
from examples.grpo.record import RunDirectory
from tlt_client import Client
from tlt_client.errors import Conflict
from tlt_server.models.environment import library_environment

STARTS = ("given", "none")
REPORTED_S = 2.0  # time after which a server's reply has what its trainer has done
POLL_S = 0.05


class KeptDrafters:
    """The drafters of a run: the first one, those of steps whose weights are kept, and the
    newest.
    """

    def __init__(self, run: RunDirectory, first: Path, keep_every: int) -> None:
        self._run, self._every = run, keep_every
        self._path = run.path / "drafters"
        if not (self._path / "00000").is_dir():
            shutil.copytree(first, self.partial())
            self.keep(0)

    def partial(self) -> Path:
        """Return a directory, not created yet, for the next drafter."""
        self._path.mkdir(exist_ok=True)
        shutil.rmtree(self._path / "partial", ignore_errors=True)
        return self._path / "partial"

    def keep(self, step: int) -> Path:
        """Keep the written drafter for this step and later, and remove those that no other step
        needs.
        """
        directory = self._path / f"{step:05}"
        shutil.rmtree(directory, ignore_errors=True)
        (self._path / "partial").rename(directory)
        kept = sorted(self._path.glob("[0-9]*"))
        for old, after in zip(kept[1:-1], kept[2:], strict=True):
            if -(-int(old.name) // self._every) * self._every >= int(after.name):
                shutil.rmtree(old)
        return directory

    def newest(self) -> Path:
        return drafter_of(self._run.path, self._run.steps)

    def push(self, pushes: Pushes, directory: Path) -> float:
        """Push one of them and return the seconds."""
        return pushes.drafter(directory, f"{self._run.path.name}-drafter-{int(directory.name)}")


def drafter_of(run: Path, step: int) -> Path:
    """Return the drafter that was active at a step of a run."""
    kept = sorted((run / "drafters").glob("[0-9]*"))
    return [directory for directory in kept if int(directory.name) <= step][-1]


class FixedDrafter:
    """A drafter that never changes."""

    def __init__(
        self,
        run: RunDirectory,
        asked: argparse.Namespace,
        kept: KeptDrafters,
        client: Client,
        pushes: Pushes,
    ) -> None:
        self._run, self._asked, self._kept, self._client = run, asked, kept, client
        self._pushes = pushes
        self._begin(client.drafter()["training"])

    def _begin(self, training: str) -> None:
        """Check or set the server's training. `training`: its setting."""
        if training != "off":
            self._client.pause_drafter_training()

    def drafts(self, version: str) -> None:
        """Note the drafter's version at the start of the next step."""

    def adapt(self, policy: nn.Module) -> tuple[float, float]:
        """Adapt the drafter to the updated policy; return the seconds of training or waiting, and
        of the push.
        """
        return 0.0, 0.0

    def figures(self) -> dict[str, Any]:
        """Return the training's figures for a step's line."""
        return {}


class AdaptiveDrafter(FixedDrafter):
    """Trained on the last steps' responses and the current policy's states, and pushed without a
    test whether it is better.
    """

    def _begin(self, training: str) -> None:
        super()._begin(training)
        self._tlt = ResidentTlt()

    def adapt(self, policy: nn.Module) -> tuple[float, float]:
        """Train and push. `CalledProcessError` if `tlt drafter train` failed."""
        run, asked, started_s = self._run, self._asked, time.perf_counter()
        target = run.path / "adapting"
        run.write_model(policy, asked.model, target)
        segments = sorted((run.path / "responses").glob("*.segment"))[-asked.drafter_window :]
        command = ["drafter", "train", "--target", str(target)]
        command += ["--drafter", str(self._kept.newest()), "--out", str(self._kept.partial())]
        command += ["--data", *map(str, segments), "--acceptance", "total-variation"]
        command += ["--steps", str(asked.drafter_steps), "--lr", str(asked.drafter_lr)]
        self._tlt.run(*command)
        directory = self._kept.keep(run.steps + 1)
        return time.perf_counter() - started_s, self._kept.push(self._pushes, directory)


class SpotDrafter(FixedDrafter):
    """Trained by the server between its rollouts, on its recorded sequences, and adopted by the
    server if held-out prompts prove it better.
    """

    def _begin(self, training: str) -> None:
        if training == "off":
            raise ValueError(
                f"{self._asked.url} does not train its drafter; start it with --drafter-training "
                "idle, --drafter-feature-mb and --state-dir, or leave --url out"
            )
        self._client.resume_drafter_training()
        self._version = self._client.weights()["drafter"]
        self._ended = ended(self._status())

    def drafts(self, version: str) -> None:
        if version != self._version:
            directory = self._kept.partial()
            directory.mkdir()
            found = self._client.fetch_drafter(directory)["version"]
            if found != version:
                said = f"the server has the drafter {found!r} by now, not {version!r}"
                raise Conflict("conflict", said, status=409)
            self._kept.keep(self._run.steps)
            self._version = version
        self._ended = ended(self._status())

    def adapt(self, policy: nn.Module) -> tuple[float, float]:
        started_s = time.perf_counter()
        while (waited_s := time.perf_counter() - started_s) < self._asked.drafter_wait_s:
            found = self._status()
            if ended(found) > self._ended or found["state"] in ("paused", "failed"):
                break
            due = found["recorded_tokens"] >= found["interval_tokens"]
            if waited_s > REPORTED_S and found["state"] == "idle" and not due:
                break
            time.sleep(POLL_S)
        return time.perf_counter() - started_s, 0.0

    def figures(self) -> dict[str, Any]:
        found = self._status()
        names = ("state", "rounds", "steps", "tokens", "parkings", "adopted", "refused")
        candidate = found["candidate"] or {}
        judged = ("outcome", "groups", "gain", "interval", "accept_length", "accept_length_before")
        judged += ("ms_per_token", "ms_per_token_before")
        return {
            "trainer": {name: found[name] for name in names}
            | {"candidate": {name: candidate[name] for name in judged} if candidate else None}
        }

    def _status(self) -> dict[str, Any]:
        status: dict[str, Any] = self._client.drafter()["trainer"]
        return status


def ended(status: dict[str, Any]) -> int:
    """Count the completed rounds of a server's trainer; a push interrupts others."""
    refused = {reason: n for reason, n in status["refused"].items() if reason != "weights_changed"}
    return int(status["adopted"]) + sum(refused.values())


ADAPTATIONS = {
    "off": FixedDrafter,
    "frozen": FixedDrafter,
    "adaptive": AdaptiveDrafter,
    "spot": SpotDrafter,
}


def untrained(model: Path, directory: Path) -> Path:
    """Write an untrained drafter, unless it exists, and return its directory."""
    if not (directory / "config.json").exists():
        command = [sys.executable, "-m", "tlt_server", "drafter", "init", "--target", str(model)]
        subprocess.run([*command, "--out", str(directory)], check=True, stdout=subprocess.DEVNULL)
    return directory


class ResidentTlt:
    """A process that runs verbs of `tlt` one after another, so that imports and a GPU's context are
    paid for once. It reads a JSON list of arguments per line and answers with its exit status.
    """

    def __init__(self) -> None:
        command = [sys.executable, "-m", "examples.grpo.adapt"]
        environment = {**os.environ, **library_environment()}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def run(self, *arguments: str) -> None:
        """Run a verb; its stdout is dropped. `CalledProcessError` if it failed, or the process has
        ended.
        """
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(arguments) + "\n")
            process.stdin.flush()
            status = process.stdout.readline()
        except BrokenPipeError:
            status = ""
        if status.strip() != "0":
            raise subprocess.CalledProcessError(int(status or process.wait()), ["tlt", *arguments])


def serve() -> None:
    """Run the verbs that arrive on stdin."""
    from tlt_server.__main__ import main

    answers = os.fdopen(os.dup(1), "w")
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)  # also for libraries that do not print through Python
    for line in sys.stdin:
        print(main(json.loads(line)), file=answers, flush=True)


if __name__ == "__main__":
    serve()
