"""An in-process engine to push weights into, and checkpoints a little different from the one it
serves.
"""

from __future__ import annotations

import itertools
import shutil
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file, save_file

from tlt_server.engine.settings import EngineSettings
from tlt_server.engine.start.assembly import assemble
from tlt_server.wire.commands import (
    AbortWeights,
    CommitWeights,
    LookAtWeights,
    Manifest,
    PushWeights,
    RollbackWeights,
    Submit,
)
from tlt_server.wire.events import ControlReport, WeightReport
from tlt_server.wire.records import GenerateRequest, Sampling, StepOutput

Said = dict[str, list[StepOutput]]


def perturbed(source: Path, directory: Path, seed: int, scale: float = 0.02) -> Path:
    """A copy whose floating-point tensors are a little off."""
    shutil.copytree(source, directory)
    generator = torch.Generator().manual_seed(seed)
    tensors = load_file(source / "model.safetensors")
    save_file(
        {
            name: t + scale * torch.randn(t.shape, generator=generator)
            if t.is_floating_point()
            else t
            for name, t in tensors.items()
        },
        directory / "model.safetensors",
    )
    return directory


def cpu_settings(model: Path | str, drafter: Path | str = "none", **fields: Any) -> EngineSettings:
    """Settings of a small engine on the CPU that does not speculate."""
    given = {"device": "cpu", "policy": "off", "kv_memory_mb": 64, **fields}
    return EngineSettings(model=Path(model), drafter=str(drafter), **given)


def small_request(max_tokens: int, id: str = "r") -> GenerateRequest:
    """A short prompt, to which as many tokens are generated."""
    sampling = Sampling(max_tokens=max_tokens, ignore_eos=True)
    return GenerateRequest(id=id, token_ids=[5, 6, 7], seed=3, sampling=sampling)


def why(report: WeightReport | ControlReport | None) -> str:
    """Return code and words of a report's error, or nothing."""
    return ": ".join((report.error if report else None) or ())


class Pushable:
    """One engine, stepped by hand; outputs are collected in `said`."""

    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings
        self.engine, self.info = assemble(settings)
        self.said: Said = {}
        self._ids = (f"w{i}" for i in itertools.count())
        self.reports: dict[str, WeightReport] = {}

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            for output in self.engine.step():
                self.said.setdefault(output.id, []).append(output)
            self.reports |= {report.id: report for report in self.engine.reports()}
            self.engine.scheduler.check()

    def submit(self, *requests: GenerateRequest) -> None:
        self.engine.send(Submit(list(requests)))

    def finish(self) -> None:
        while not self.engine.idle:
            self.step()

    def until(self, condition: Callable[[], bool], what: str) -> None:
        give_up = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < give_up, f"no {what} within 60 s"
            self.step()
            if self.engine.last_cycle is None:
                # As the engine's process waits; a thread needs the interpreter, too.
                time.sleep(0.0005)

    # weight commands; each gives the id of its report

    def send_push(self, path: Path | str, version: str = "", **fields: object) -> str:
        id = next(self._ids)
        self.engine.send(
            PushWeights(
                id, msgspec.convert({"path": str(path), "version": version, **fields}, Manifest)
            )
        )
        return id

    def report(self, id: str) -> WeightReport:
        self.until(lambda: id in self.reports, f"report {id}")
        return self.reports[id]

    def push(self, path: Path | str, version: str = "", **fields: object) -> WeightReport:
        return self.report(self.send_push(path, version, **fields))

    def send_roll_back(self, to: str = "", **fields: object) -> str:
        id = next(self._ids)
        self.engine.send(RollbackWeights(id, to, **fields))  # type: ignore[arg-type]
        return id

    def roll_back(self, to: str = "", **fields: object) -> WeightReport:
        return self.report(self.send_roll_back(to, **fields))

    def send_commit(self, version: str = "") -> str:
        id = next(self._ids)
        self.engine.send(CommitWeights(id, version))
        return id

    def commit(self, version: str) -> WeightReport:
        return self.report(self.send_commit(version))

    def abort(self, version: str) -> WeightReport:
        id = next(self._ids)
        self.engine.send(AbortWeights(id, version))
        return self.report(id)

    def look(self) -> WeightReport:
        """Ask for a report with mix64 of every live tensor, computed again."""
        id = next(self._ids)
        self.engine.send(LookAtWeights(id, checksums=True))
        return self.report(id)

    def checksums(self) -> dict[str, str]:
        return self.look().checksums

    # what was said

    def tokens(self, id: str) -> list[int]:
        return [token for output in self.said[id] for token in output.token_ids]

    def logprobs(self, id: str) -> list[float]:
        return [value for output in self.said[id] for value in output.logprobs]

    def spans(self, id: str) -> list[tuple[str, int, int]]:
        """Return the versions with their token ranges, as the frontend joins them."""
        versions = [output.weight_version for output in self.said[id] for _ in output.token_ids]
        starts = [i for i, version in enumerate(versions) if i == 0 or version != versions[i - 1]]
        return [
            (versions[start], start, end)
            for start, end in zip(starts, [*starts[1:], len(versions)], strict=True)
        ]

    def run(self, *requests: GenerateRequest) -> dict[str, tuple[list[int], list[float]]]:
        """Submit, run to the end, and give tokens and log-probs; ids may come again."""
        for request in requests:
            self.said.pop(request.id, None)
        self.submit(*requests)
        self.finish()
        return {
            request.id: (self.tokens(request.id), self.logprobs(request.id)) for request in requests
        }


def push_until_first_weights_end(engine: Pushable, root: Path) -> None:
    """Replace both roles twice, after which the initial weights must be freed."""
    live = engine.engine.pushes.transaction.versions.live
    first = [weakref.ref(part.network) for part in live.by_role.values()]
    del live
    for version in ("1", "2"):
        engine.push(root / "new", f"v{version}")
        engine.push(root / "new-drafter", f"d{version}", role="drafter")
    assert len(first) == 2
    engine.until(lambda: all(ref() is None for ref in first), "end of the first weights")
