"""`tlt drafter train`: train a drafter on text files, with features that the target computes again
on the same device.

`--record` names responses that are not trained on: the drafter's calibration is fitted to them, and
the training stops once chains replayed on them reach the accept length of `--stop-at`.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tlt_server.drafter.data import TargetLimits, read_documents
from tlt_server.drafter.device import device_of, memory_refused
from tlt_server.drafter.out import new_directory
from tlt_server.drafter.records import load_record
from tlt_server.errors import StartupError
from tlt_server.models.config import ModelConfig
from tlt_server.models.draft_checkpoint import feature_layers
from tlt_server.trainer.judging.figures import accept_length
from tlt_server.trainer.learning.checkpoint import CHECKSUM, Checkpoints, newest
from tlt_server.trainer.learning.network import TrainableDrafter, load_trainable
from tlt_server.trainer.learning.objectives import make_objective
from tlt_server.trainer.learning.pack import Cursor, Packer
from tlt_server.trainer.learning.step import AdamWSettings, StepOutcome, Trainer, default_rate
from tlt_server.trainer.replaying.evaluate import ReplayStage, Task, evaluate, fit_calibration
from tlt_server.trainer.replaying.plans import PinnedPlan, usual_tree
from tlt_server.trainer.replaying.replay import ReplayedDrafter
from tlt_server.trainer.target.prefill import Prefill, load_prefill
from tlt_server.trainer.target.recompute import Document, Recomputed, RecomputedFeatures
from tlt_server.weights.checksums import checksum
from tlt_server.wire.records import Strategy

PLAIN_EVERY_S = 5.0


def run(arguments: argparse.Namespace) -> int:
    if arguments.stop_at and not arguments.record:
        raise StartupError(
            "--stop-at needs responses to replay: name some that are not trained on as --record"
        )
    config = ModelConfig.read(arguments.target)
    config = config.stored_as(arguments.quantization, str(arguments.target))
    documents = read_documents(
        arguments.data, TargetLimits(config.vocab_size, config.max_position), arguments.target
    )
    device = device_of(arguments.device)
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    with memory_refused(device):
        return _run(arguments, config, documents, device)


def _run(
    arguments: argparse.Namespace, config: ModelConfig, documents: Sequence[Document], device: str
) -> int:
    compute = torch.bfloat16 if device == "cuda" else torch.float32
    # First, so that a drafter of another target is refused before a large one is read.
    network = load_trainable(arguments.drafter, config, compute=compute, device=device)
    layers = feature_layers(arguments.drafter, config)
    target = load_prefill(arguments.target, device, layers, config)
    source = Recomputed(target, documents)
    held_out = _HeldOut(arguments, config, target, device) if arguments.record else None
    with new_directory(arguments.out) as directory:
        trainer, packer = _build(arguments, network, source, target)
        tokens = sum(source.lengths)
        _say(
            f"{len(documents)} documents, {tokens} tokens; {len(packer.plan(0))} packs an epoch; "
            f"learning rate {trainer.settings.lr:g}; on {trainer.network.device}"
        )
        checkpoints = _resume(arguments, trainer, tokens)
        _train(arguments, trainer, packer, checkpoints, held_out)
        _write(trainer.network, arguments.drafter, directory)
        if held_out is not None:
            held_out.calibrate(directory)
    _say(f"{arguments.out}: trained for {trainer.state.step} steps")
    return 0


def _write(network: TrainableDrafter, started_from: Path, directory: Path) -> None:
    shutil.copyfile(started_from / "config.json", directory / "config.json")
    network.save(directory)


class _HeldOut:
    """Recorded responses for replays of a drafter in training."""

    def __init__(
        self, arguments: argparse.Namespace, config: ModelConfig, target: Prefill, device: str
    ) -> None:
        record = load_record(arguments.record, arguments.target)
        record.expect_one_version()
        record.positions(config)
        self._responses, self._target, self._device = record.samples.responses, target, device
        self._drafter, self._wanted = arguments.drafter, arguments.stop_at
        self._all = range(len(self._responses))

    def stops(self, trainer: Trainer) -> bool:
        """Return True if chains of the drafter reach the requested accept length."""
        if self._wanted is None:
            return False
        depth = trainer.objective.steps
        with TemporaryDirectory(prefix="tlt-drafter-") as directory:
            _write(trainer.network, self._drafter, Path(directory))
            drafter = self._load(Path(directory))
        chain = Strategy(drafter.kind, depth, 1, depth + 1)
        task = Task(drafter, PinnedPlan(chain, floored=False))
        (walked,) = evaluate(self._responses, self._all, [task], self._stage())
        length = accept_length(walked)
        _say(f"step {trainer.state.step}: chains of {depth} have accept length {length:.3f}")
        return length >= self._wanted

    def calibrate(self, directory: Path) -> None:
        """Fit and write the calibration of the drafter in a directory."""
        drafter = self._load(directory)
        tree = usual_tree(drafter.kind)
        fit_calibration(drafter, self._responses, self._all, self._stage(), tree)
        drafter.weights.calibration.save(directory)

    def _load(self, directory: Path) -> ReplayedDrafter:
        return ReplayedDrafter.load(directory, self._target.model, device=self._device)

    def _stage(self) -> ReplayStage:
        return ReplayStage(RecomputedFeatures(self._target))


def _build(
    arguments: argparse.Namespace, network: TrainableDrafter, source: Recomputed, target: Prefill
) -> tuple[Trainer, Packer]:
    objective = make_objective(
        arguments.objective, arguments.acceptance, arguments.acceptance_weight, arguments.unroll
    )
    settings = AdamWSettings(
        lr=arguments.lr or default_rate(network.config.hidden_size),
        warmup_steps=min(100, arguments.steps // 10),
        total_steps=arguments.steps,
    )
    frozen = network.frozen(target.embedding_VH, target.head_rows(network.target_ids_C))
    trainer = Trainer(network, frozen, objective, settings)
    return trainer, Packer(source, arguments.budget, objective.steps, arguments.seed)


def _resume(arguments: argparse.Namespace, trainer: Trainer, tokens: int) -> Checkpoints | None:
    """Continue from the newest checkpoint of the same run, if there is one."""
    if arguments.checkpoints is None:
        return None
    same = ("objective", "acceptance", "acceptance_weight", "unroll", "budget", "packs", "seed")
    identity = {name: str(getattr(arguments, name)) for name in same}
    identity |= {
        "lr": repr(trainer.settings.lr),
        "steps": str(trainer.settings.total_steps),
        "tokens": str(tokens),
        "weights": str(len(trainer.state.weight_P)),
        "drafter": checksum(CHECKSUM, trainer.state.weight_P),
        "target": checksum(CHECKSUM, trainer.frozen.head_CH),
    }
    found, faults = newest(arguments.checkpoints, identity)
    for fault in faults:
        _say(fault)
    if found is not None:
        trainer.resume(found.state)
        _say(f"resumed from {found.path}")
    return Checkpoints(arguments.checkpoints, trainer, identity)


def _train(
    arguments: argparse.Namespace,
    trainer: Trainer,
    packer: Packer,
    checkpoints: Checkpoints | None,
    held_out: _HeldOut | None,
) -> None:
    network, display = trainer.network, _Display(arguments.steps, trainer.state.step)
    saved, idle = trainer.state.step, 0
    with display.progress:
        while trainer.state.step < arguments.steps:
            if checkpoints is not None and trainer.state.step >= saved + arguments.save_every:
                checkpoints.begin()
                saved = trainer.state.step
            packs, cursor = [], Cursor(*trainer.state.cursor)
            for _ in range(arguments.packs):
                pack, cursor = packer.next(cursor)
                packs.append(pack.to(network.device, network.compute))
            outcome = trainer.step(packs)
            trainer.state.cursor = cursor
            display.show(trainer, outcome)
            idle = 0 if outcome.applied else idle + 1
            _check(trainer, outcome, idle > len(packer.plan(cursor.epoch)))
            looks = outcome.applied and trainer.state.step % arguments.check_every == 0
            if looks and held_out is not None and held_out.stops(trainer):
                break
    if checkpoints is not None:
        checkpoints.finish()
        if checkpoints.failure:
            _say(checkpoints.failure)


def _check(trainer: Trainer, outcome: StepOutcome, idle: bool) -> None:
    """Raise `StartupError` if a run makes no progress."""
    if idle and not trainer.undone:
        raise StartupError(
            "no response in the data has two tokens of which the second is in the draft "
            "vocabulary, so there is nothing to learn; make the drafter from this data"
        )
    if trainer.restored > 3:
        raise StartupError(
            f"{trainer.undone} steps were undone because loss ({outcome.loss:g}) or gradient "
            f"({outcome.gradient_norm:g}) was not finite; start with a smaller --lr"
        )


class _Display:
    """A live line on a terminal, a plain one every few seconds elsewhere; on stderr."""

    def __init__(self, steps: int, done: int) -> None:
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self.progress = Progress(
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self.progress.add_task("", total=steps, completed=done)
        self._steps, self._began, self._tokens = steps, time.monotonic(), 0
        self._said = 0.0

    def show(self, trainer: Trainer, outcome: StepOutcome) -> None:
        now, step = time.monotonic(), trainer.state.step
        self._tokens += outcome.tokens
        agreement = " ".join(f"{share:.0%}" for share in outcome.agreement_S)
        line = (
            f"loss {outcome.loss:.3f}, top-1 agreement by step {agreement}, "
            f"{self._tokens / (now - self._began):.0f} tokens/s"
            + (f", {trainer.undone} steps undone" if trainer.undone else "")
        )
        self.progress.update(self._task, completed=step, description=line)
        if self.progress.disable and (now - self._said > PLAIN_EVERY_S or step == self._steps):
            self._said = now
            _say(f"step {step} of {self._steps}: {line}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
