"""The files of a run, and how a run continues from them.

`steps.jsonl` has a line per step, `responses/` every response in the segment files of the server,
with its reward, `weights/` the policy of chosen steps as model directories, `state.safetensors` the
policy and its optimizer after the last step. Files appear complete or not at all.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from safetensors import safe_open
from safetensors.numpy import load_file
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import save_file
from torch import nn

from examples.grpo.rollouts import Group
from tlt_client.wire import Choice
from tlt_server.samples.identity import identity_of
from tlt_server.samples.sample import Sample
from tlt_server.samples.segments import (
    SUFFIX,
    Refusals,
    SegmentHeader,
    header_bytes,
    read_segment,
    recorded,
)

MOMENTS = ("exp_avg", "exp_avg_sq")
COPIED = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


class RunDirectory:
    """The files of one run. `steps`: number of finished steps."""

    def __init__(self, path: Path, options: Mapping[str, Any], *, resume: bool) -> None:
        """`options`: fix a run's tokens; `ValueError` if an earlier part of it had others."""
        self.path, self.steps = path, 0
        self._state, self._lines = path / "state.safetensors", path / "steps.jsonl"
        if not resume and self._lines.exists():
            raise ValueError(f"{path} has a run; give --resume to go on with it, or another --out")
        for folder in ("responses", "weights"):
            (path / folder).mkdir(parents=True, exist_ok=True)
        saved = path / "options.json"
        if resume and saved.exists():
            before = json.loads(saved.read_text())
            for name in options:
                if options[name] != before.get(name):
                    raise ValueError(
                        f"{path} was started with {name}={before.get(name)}, not {options[name]}"
                    )
        saved.write_text(json.dumps(dict(options), indent=1) + "\n")

    def restore(self, policy: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Load the last state, if there is one, and drop the lines of steps after it."""
        if not self._state.exists():
            return
        with safe_open(self._state, "pt") as file:
            self.steps = int(file.metadata()["steps"])
            updates = float(file.metadata()["updates"])  # 0: no group has had an advantage yet
            with torch.no_grad():
                for name, parameter in policy.named_parameters():
                    parameter.copy_(file.get_tensor(name))
                    if updates and parameter.requires_grad:
                        moments = {m: file.get_tensor(f"{m}.{name}") for m in MOMENTS}
                        optimizer.state[parameter] = {"step": torch.tensor(updates), **moments}
        lines = self._lines.read_text().splitlines()[: self.steps]
        _write(self._lines, lambda path: path.write_text("".join(line + "\n" for line in lines)))

    def save(
        self, policy: nn.Module, optimizer: torch.optim.Optimizer, figures: Mapping[str, Any]
    ) -> None:
        """Add a step's line, then write the state to continue from."""
        with self._lines.open("a") as file:
            file.write(json.dumps(dict(figures)) + "\n")
        self.steps += 1
        tensors, updates = dict(policy.named_parameters()), 0
        for name, parameter in policy.named_parameters():
            if state := optimizer.state.get(parameter):
                tensors |= {f"{moment}.{name}": state[moment] for moment in MOMENTS}
                updates = int(state["step"])
        metadata = {"steps": str(self.steps), "updates": str(updates)}
        _write(self._state, lambda path: save_file(tensors, path, metadata))

    def keep_weights(self, policy: nn.Module, model: Path) -> None:
        """Keep the policy as a model directory in float32, as pushed."""
        self.write_model(policy, model, self.path / "weights" / f"{self.steps:05}")

    def write_model(self, policy: nn.Module, model: Path, directory: Path) -> None:
        """Write the policy with the other files of a model directory."""
        directory.mkdir(exist_ok=True)
        for name in COPIED:
            shutil.copy(model / name, directory)
        tensors = {name: value.detach() for name, value in policy.named_parameters()}
        _write(
            directory / "model.safetensors", lambda path: save_file(tensors, path, {"format": "pt"})
        )

    def keep_responses(
        self, groups: Sequence[Group], version: str, model: Path, max_tokens: int
    ) -> None:
        """Write a step's responses as a segment, and their log-probs, rewards and problems."""
        pairs = [(group, choice) for group in groups for choice in group.choices]
        samples = [_sample(group, choice, version, max_tokens) for group, choice in pairs]
        first = self.steps * len(samples) + 1
        frames = [recorded(first + i, sample)[1] for i, sample in enumerate(samples)]
        data = header_bytes(header_of(model)) + b"".join(frames)
        arrays = {
            "logprobs": np.array([p for _, choice in pairs for p in choice.logprobs], np.float32),
            "rewards": np.array([r for group in groups for r in group.rewards], np.float32),
            "problems": np.array([group.prompt.number for group, _ in pairs], np.int64),
        }
        path = self.path / "responses" / f"{self.steps:05}"
        _write(path.with_suffix(SUFFIX), lambda path: path.write_bytes(data))
        _write(path.with_suffix(".safetensors"), lambda path: save_arrays(arrays, path))


def header_of(model: Path) -> SegmentHeader:
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    return SegmentHeader.of(identity_of(model), vocab_size)


def load_samples(run: Path, step: int) -> list[Sample]:
    """Return a step's responses. `ValueError` if some cannot be read."""
    refusals = Refusals()
    file = run / "responses" / f"{step:05}{SUFFIX}"
    samples = [
        entry.sample for entry in read_segment(file, header_of(run / "weights" / "00000"), refusals)
    ]
    if refusals.count:
        raise ValueError("; ".join(refusals.messages))
    return samples


def _sample(group: Group, choice: Choice, version: str, max_tokens: int) -> Sample:
    """Return a response as a server records it, without its cycles, which replies do not
    contain.
    """
    return Sample(
        tokens=np.array(group.prompt.token_ids + choice.token_ids, "<i4").tobytes(),
        prompt_len=len(group.prompt.token_ids),
        group=str(group.prompt.number),
        owner="",
        seed=choice.seed,
        temperature=1.0,
        top_p=1.0,
        min_p=0.0,
        top_k=0,
        max_tokens=max_tokens,
        end=choice.finish_reason,
        spans=[(0, version)],
        first_root=0,
        gaps=[],
        drafted=[],
        rows=b"",
        branches=b"",
        accepted=b"",
        own_accepted=b"",
        how=b"",
    )


def differences(first: Path, second: Path) -> list[str]:
    """Return the differences between the bits of two runs: tokens, log-probs and rewards of the
    responses, and the weights with their optimizer. Version names do not count.
    """
    steps = {file.stem for run in (first, second) for file in run.glob("responses/*")}
    found = []
    for step in sorted(steps):
        ours, theirs = (
            [replace(sample, spans=[]) for sample in load_samples(run, int(step))]
            for run in (first, second)
        )
        if ours != theirs:
            found.append(f"tokens of step {step}")
    for name in (*(f"responses/{step}" for step in sorted(steps)), "state"):
        arrays, others = (load_file(run / f"{name}.safetensors") for run in (first, second))
        found += [
            f"{name}: {array}"
            for array in sorted(arrays.keys() | others.keys())
            if array not in arrays or array not in others or not _same(arrays[array], others[array])
        ]
    return found


def _same(ours: np.ndarray[Any, Any], theirs: np.ndarray[Any, Any]) -> bool:
    """Compare bits: NaN equals itself, and -0.0 differs from 0.0."""
    alike = ours.dtype == theirs.dtype and ours.shape == theirs.shape
    return alike and ours.tobytes() == theirs.tobytes()


def accept_length(choices: Sequence[Choice]) -> float | None:
    """Return the tokens per step with drafts, the bonus token included."""
    drafting = [choice.sd for choice in choices if choice.sd.mean_accept_length is not None]
    steps = sum(sd.draft_steps for sd in drafting)
    tokens = sum((sd.mean_accept_length or 0.0) * sd.draft_steps for sd in drafting)
    return tokens / steps if steps else None


def acceptance_by_depth(choices: Sequence[Choice]) -> list[float]:
    """Return the shares of steps with a draft that accepted at least 1, 2, ... drafts."""
    counts = [
        sum(column) for column in zip_longest(*(c.sd.histogram for c in choices), fillvalue=0)
    ]
    return [sum(counts[depth:]) / sum(counts) for depth in range(1, len(counts))]


def _write(path: Path, write: Any) -> None:
    partial = path.with_name(path.name + ".partial")
    write(partial)
    os.replace(partial, path)
