"""The oracle of a run, and the replay of frozen, adaptive and oracle drafters over its record.

All three draft by one strategy on the same responses, with the features of the policy that gave
them, so their cycles differ by the drafter only.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from msgspec import structs
from numpy.typing import NDArray

from examples.grpo.adapt import drafter_of
from examples.grpo.foreign import tlt_drafter
from examples.grpo.record import load_samples
from tlt_server.drafter.device import device_of
from tlt_server.models.config import ModelConfig
from tlt_server.samples.identity import identity_of
from tlt_server.samples.sample import sample_set
from tlt_server.speculation.drafters.loading import find_loader
from tlt_server.trainer.evaluate import ReplayStage, Task, evaluate
from tlt_server.trainer.figures import ByResponse, by_response, gap_recovered
from tlt_server.trainer.plans import PinnedPlan
from tlt_server.trainer.prefill import load_prefill
from tlt_server.trainer.recompute import RecomputedFeatures
from tlt_server.trainer.replay import ReplayedDrafter
from tlt_server.wire.records import Strategy, parse_strategy

PAGE_SIZE = 16
NAMES = ("frozen", "adaptive", "oracle")
WORTH = 1.03  # accept length of the oracle over the frozen one below which nothing is to be gained


class ReplayedStep(NamedTuple):
    """The cycles of each drafter, by response, and the prompt of each response."""

    drafters: list[ByResponse]
    group_N: NDArray[np.int32]


def compare(asked: argparse.Namespace) -> int:
    """Print a line per step and one for all, and write them to RUN/gap.json. `ValueError`: no step
    can be replayed.
    """
    torch.set_num_threads(asked.threads)
    asked.device = device_of(asked.device)
    run, strategy = asked.run, parse_strategy(asked.strategy)
    steps = [int(path.name) for path in sorted((run / "weights").iterdir())]
    last, steps = steps[-1], [step for step in steps if _has_responses(run, step)]
    oracle = asked.oracle or trained_oracle(run, last, steps, asked)
    steps = [step for step in steps if step >= asked.from_step]
    if not steps:
        raise ValueError(f"{run} keeps no weights of a step from {asked.from_step} on")
    print(" ".join(f"{name:>9}" for name in ("step", *NAMES)) + "  gap recovered [95 %]")
    replayed, lines = [], []
    for step in steps:
        drafters = [drafter_of(run, 0), drafter_of(run, step), oracle]
        replayed.append(replay(run, step, drafters, strategy, asked.device))
        lines.append(_line(f"{step}", replayed[-1]))
    lines.append(_line("all", joined(replayed)))
    (run / "gap.json").write_text(json.dumps({"strategy": strategy.name, "steps": lines}) + "\n")
    return 0


def trained_oracle(
    run: Path, last: int, replayed: Sequence[int], asked: argparse.Namespace
) -> Path:
    """Return the run's oracle, trained where it is missing."""
    directory: Path = run / "oracle"
    if not (directory / "config.json").exists():
        data = [
            path
            for path in sorted((run / "responses").glob("*.segment"))
            if int(path.stem) not in replayed
        ]
        flags = ["--drafter", drafter_of(run, 0), "--data", *data, "--out", directory]
        flags += ["--acceptance", "total-variation", "--steps", asked.oracle_steps]
        flags += ["--lr", asked.oracle_lr, "--checkpoints", run / "oracle-checkpoints"]
        flags += ["--device", asked.device]
        tlt_drafter("train", *flags, target=run / "weights" / f"{last:05}")
    return directory


def replay(
    run: Path, step: int, drafters: Sequence[Path], strategy: Strategy, device: str
) -> ReplayedStep:
    """Replay drafters that read the same layers over the responses of a step."""
    model = run / "weights" / f"{step:05}"
    config = ModelConfig.read(model)
    samples = sample_set(load_samples(run, step), identity_of(model), config.vocab_size)
    responses = samples.responses
    longest = int((responses.prompt_len_N + responses.output_len_N).max())
    layers = find_loader(drafters[0], device).feature_layers(drafters[0], config)
    target = load_prefill(model, device, layers, replace(config, max_position=longest))
    loaded = [ReplayedDrafter.load(each, target.model, device=device) for each in drafters]
    tasks = [
        Task(each, PinnedPlan(structs.replace(strategy, drafter=each.kind))) for each in loaded
    ]
    stage = ReplayStage(RecomputedFeatures(target), PAGE_SIZE)
    walks = evaluate(responses, range(len(responses)), tasks, stage)
    return ReplayedStep([by_response(walked) for walked in walks], responses.group_N)


def joined(steps: Sequence[ReplayedStep]) -> ReplayedStep:
    """Return the steps as one, whose prompts are all different."""
    responses = np.cumsum([0, *(len(step.group_N) for step in steps)])
    groups = np.cumsum([0, *(int(step.group_N.max()) + 1 for step in steps)])
    drafters = []
    for i in range(len(steps[0].drafters)):
        parts = [
            step.drafters[i]._replace(response_N=step.drafters[i].response_N + first)
            for step, first in zip(steps, responses[:-1], strict=True)
        ]
        drafters.append(ByResponse(*(np.concatenate(each) for each in zip(*parts, strict=True))))
    group_N = np.concatenate([step.group_N + at for step, at in zip(steps, groups, strict=False)])
    return ReplayedStep(drafters, group_N.astype(np.int32))


def _line(name: str, step: ReplayedStep) -> dict[str, object]:
    """Print the figures of a step and return them."""
    lengths = [float(each.tokens_N.sum() / each.cycles_N.sum()) for each in step.drafters]
    with np.errstate(divide="ignore", invalid="ignore"):  # resampled prompts may leave no gap
        gap = gap_recovered(*step.drafters, step.group_N)
    said = f"{gap.value:.0%} [{gap.low:.0%}, {gap.high:.0%}]"
    if lengths[2] < WORTH * lengths[0]:
        said = f"nothing to gain: oracle / frozen is {lengths[2] / lengths[0]:.3f}"
    print(
        f"{name:>9} " + " ".join(f"{length:9.3f}" for length in lengths) + f"  {said}", flush=True
    )
    figures = {name: round(length, 4) for name, length in zip(NAMES, lengths, strict=True)}
    recovered = [round(float(x), 4) for x in gap] if np.isfinite(gap).all() else None
    return {"step": name, **figures, "gap_recovered": recovered}


def _has_responses(run: Path, step: int) -> bool:
    return (run / "responses" / f"{step:05}.segment").exists()
