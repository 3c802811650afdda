"""The runs of `tlt bench exact`: the engines for them, the versions of the target, and the outputs
of requests, also over several epochs of an engine.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tlt_server.bench.adapters import RANK, load_adapters, pushed, write_adapters
from tlt_server.bench.engines import LoadedOnce, ReadyFor, adopt, release
from tlt_server.bench.exact_plan import (
    ADAPTERS,
    PLANS,
    PUSHED,
    STARTED,
    VERSIONS,
    Configuration,
    ExactSize,
    pages_for,
)
from tlt_server.bench.faults import planted
from tlt_server.bench.settings import own
from tlt_server.engine.cpu.runner import CpuRunner
from tlt_server.engine.devices import Device, make_device
from tlt_server.engine.loop import Engine
from tlt_server.engine.phases import OnPhase
from tlt_server.engine.ranks.ranks import Ranks
from tlt_server.engine.settings import DecidedSettings, EngineSettings
from tlt_server.engine.start.assembly import assemble
from tlt_server.errors import EngineFailed
from tlt_server.wire.commands import (
    ClearCache,
    Manifest,
    PushWeights,
    RollbackWeights,
    SetPolicy,
    Submit,
)
from tlt_server.wire.fingerprint import Fingerprint
from tlt_server.wire.records import GenerateRequest

SCALE = 0.01  # relative standard deviation of a pushed version's change


class Bits(NamedTuple):
    """The output of one request in one run."""

    tokens: list[int]
    logprobs: bytes  # float32; those of the prompt come first


def digest_of(outputs: dict[str, Bits]) -> str:
    """Return a hash of all outputs. If it moves, the fingerprint has to."""
    found = hashlib.sha256()
    for id, (tokens, logprobs) in sorted(outputs.items()):
        found.update(msgspec.msgpack.encode((id, tokens, logprobs)))
    return found.hexdigest()[:16]


class SaidBits:
    """The outputs of requests so far."""

    def __init__(self, requests: list[GenerateRequest]) -> None:
        self._tokens: dict[str, list[int]] = {r.id: [] for r in requests}
        self._logprobs: dict[str, list[float]] = {r.id: [] for r in requests}
        self._open = {r.id: r for r in requests}
        self.passes = 0

    def run(self, engine: Engine, until_tokens: float = float("inf")) -> None:
        """Step until no request runs, or all together have `until_tokens` tokens."""
        while not engine.idle and sum(map(len, self._tokens.values())) < until_tokens:
            for output in engine.step():
                assert output.error is None, f"{output.id}: {output.error}"
                scored = [each for each in output.prompt_logprobs or [] if each is not None]
                self._tokens[output.id] += output.token_ids
                self._logprobs[output.id] += [
                    *(each.logprobs[0] for each in scored),
                    *output.logprobs,
                ]
                if output.finish_reason is not None:
                    del self._open[output.id]
            self.passes += engine.last_cycle is not None

    def rest(self) -> list[GenerateRequest]:
        """Return the unfinished requests in the form in which another engine resumes them."""
        return [
            msgspec.structs.replace(request, generated=self._tokens[id])
            for id, request in self._open.items()
        ]

    def bits(self) -> dict[str, Bits]:
        return {
            id: Bits(tokens, np.array(self._logprobs[id], np.float32).tobytes())
            for id, tokens in self._tokens.items()
        }


def run_until_killed(engine: Engine, said: SaidBits, tokens: int) -> None:
    """Run until there are `tokens` tokens, then kill a rank, which must end the engine's epoch."""
    runner = engine.runner
    assert isinstance(runner, CpuRunner) and isinstance(runner.ranks, Ranks)
    said.run(engine, tokens)
    assert said.rest(), "nothing runs at the kill"
    os.kill(runner.ranks.pids[-1], signal.SIGKILL)
    try:
        said.run(engine)
    except EngineFailed:
        runner.ranks.close()
    else:
        raise AssertionError("the engine went on without a rank")


def write_pushed(model: Path, root: Path, *, on_gpu: bool) -> None:
    """Write a target with slightly different weights."""
    directory, device = root / PUSHED, "cuda" if on_gpu else "cpu"
    shutil.copytree(model, directory, ignore=shutil.ignore_patterns("*.safetensors"))
    for number, file in enumerate(sorted(model.glob("*.safetensors"))):
        generator, changed = torch.Generator(device).manual_seed(number), load_file(file, device)
        for tensor in changed.values():
            if tensor.is_floating_point():
                noise = torch.randn(tensor.shape, generator=generator, device=device)
                tensor.copy_(tensor.float().mul_(noise.mul_(SCALE).add_(1)))
        held = {name: tensor.cpu() for name, tensor in changed.items()}
        save_file(held, directory / file.name, metadata={"format": "pt"})


def bring(engine: Engine, version: str) -> None:
    """Make a version of the target active on an idle engine."""
    if engine.pushes.state().target == version:
        return
    back = RollbackWeights(version, STARTED)
    onward = PushWeights(version, Manifest(path=PUSHED, version=PUSHED))
    pushed(engine, back if version == STARTED else onward)


class ExactEngines:
    """Engines for one batch size after another, in this process, with shared weights."""

    def __init__(
        self, base: EngineSettings, on_phase: OnPhase = lambda name, seconds, detail: None
    ) -> None:
        self.base, self.plan, self._on_phase = base, PLANS[str(base.device)], on_phase
        self._strategies = [own(each, base) for each in self.plan.strategies]
        self._source = LoadedOnce(self._strategies)
        self._engine: Engine | None = None
        self._root = TemporaryDirectory(prefix="tlt-exact-")
        self.shared = base.tensor_parallel > 1
        self.versions = VERSIONS if self.shared else (STARTED,)
        if self.shared:
            write_pushed(Path(base.model), Path(self._root.name), on_gpu=base.device == "cuda")
        else:
            write_adapters(Path(base.model), Path(self._root.name))
        self._of: tuple[int, bool, str] | None = None
        self.fingerprint: Fingerprint | None = None  # the last engine's

    def _ready(self, settings: DecidedSettings) -> Device:
        return ReadyFor(make_device(settings), self._strategies)

    def engine(self, batch: int, *, fault: bool, reference: str = "") -> Engine:
        """Return the engine for up to `batch` requests at once. One with a planted fault captures
        nothing; the reference of a version has a separate engine, which starts with that version
        and without speculation.
        """
        if self._engine is None or self._of != (batch, fault, reference):
            self.end()
            root = Path(self._root.name)
            settings = replace(
                self.base,
                policy="off" if reference else self.plan.starts,
                max_running=batch,
                max_rows=self.plan.max_rows,
                graphs=self.base.graphs and not fault,
                model=root / PUSHED if reference == PUSHED else self.base.model,
                weight_root=None if reference and self.shared else root,
                max_loras=0 if self.shared else len(ADAPTERS) - 1,
                max_lora_rank=RANK,
                tensor_parallel=1 if reference else self.base.tensor_parallel,
            )
            device = self._ready if self.shared else self._source.device
            self._engine, info = assemble(settings, self._on_phase, make_device=device)
            assert self.fingerprint in (None, info.fingerprint), "runs of different numerics"
            self.fingerprint = info.fingerprint
            if not self.shared:
                load_adapters(self._engine)
            self._of = batch, fault, reference
        return self._engine

    def end(self) -> None:
        """End the present engine; weights of its own are freed with it."""
        self._engine = self._of = None
        release()


def rollout(
    engines: ExactEngines,
    configuration: Configuration,
    requests: list[GenerateRequest],
    size: ExactSize,
    *,
    fault: bool = False,
    version: str = STARTED,
    killed_after: int = 0,
) -> tuple[dict[str, Bits], dict[str, float]]:
    """Run all requests on an engine without memory of earlier runs, with a version of the target;
    return each output and the run's counts. `killed_after`: tokens before a rank is killed and
    another engine resumes the requests; 0: none is killed.
    """
    batch, reference = int(str(configuration["batch"])), configuration is engines.plan.reference
    said, preemptions = SaidBits(requests), 0
    if killed_after:
        engine = engines.engine(batch, fault=False)
        prepare(engines, engine, configuration, requests, size, version)
        before = engine.scheduler.preemptions
        engine.send(Submit(requests))
        run_until_killed(engine, said, killed_after)
        preemptions += engine.scheduler.preemptions - before
        del engine
        engines.end()
    engine = engines.engine(batch, fault=fault, reference=version if reference else "")
    kept_back = prepare(
        engines, engine, configuration, requests, size, "" if reference else version
    )
    before = engine.scheduler.preemptions
    engine.send(Submit(said.rest()))
    with planted(engine) if fault else nullcontext():
        said.run(engine)
    engine.scheduler.pool.release(kept_back)
    engine.scheduler.check()
    preemptions += engine.scheduler.preemptions - before
    return said.bits(), {"passes": said.passes, "preemptions": preemptions}


def prepare(
    engines: ExactEngines,
    engine: Engine,
    configuration: Configuration,
    requests: list[GenerateRequest],
    size: ExactSize,
    version: str,
) -> list[int]:
    """Prepare an idle engine: forget earlier runs, set the settings of a run and the version
    (empty: the present one). Return the pages to withhold.
    """
    if version:
        bring(engine, version)
    policy, strategy = engines.plan.arms[str(configuration["arm"])]
    adopt(engine, SetPolicy(policy, strategy and own(strategy, engines.base)))
    engine.send(ClearCache("exact"))
    engine.step()
    assert [report.error for report in engine.control_reports()] == [None]
    engine.scheduler.max_rows = int(str(configuration["chunk"]))
    pool = engine.scheduler.pool
    pages = pages_for(configuration, requests, size, pool.page_size)
    kept_back = pool.allocate(max(0, pool.pages - pages)) if pages is not None else []
    assert kept_back is not None, "an idle engine holds no pages"
    return kept_back
