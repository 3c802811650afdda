"""The files of a run, and how it goes on from them.

`steps.jsonl` has a line per step, `responses/` every response as the server's own record keeps
them, `weights/` the policy of chosen steps as model directories, `state.safetensors` the policy and
its optimizer after the last step. Files appear whole or not at all.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import zip_longest
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors import safe_open
from safetensors.numpy import load_file
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import save_file
from torch import nn

from examples.grpo.rollouts import Group
from tlt_client.wire import Choice
from tlt_server.samples.columns import parsed, tensors_of
from tlt_server.samples.identity import identity_of
from tlt_server.samples.samples import Legend, Responses, SampleSet, Verifications

MOMENTS = ("exp_avg", "exp_avg_sq")
ENDS = ("stop", "length")
COPIED = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


class RunDirectory:
    """The files of one run. `steps`: how many are done."""

    def __init__(self, path: Path, options: Mapping[str, Any], *, resume: bool) -> None:
        """`options` fix a run's tokens; `ValueError` if an earlier part of it had others."""
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
                        f"{path} was begun with {name}={before.get(name)}, not {options[name]}"
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
                    if updates:
                        moments = {m: file.get_tensor(f"{m}.{name}") for m in MOMENTS}
                        optimizer.state[parameter] = {"step": torch.tensor(updates), **moments}
        lines = self._lines.read_text().splitlines()[: self.steps]
        _write(self._lines, lambda path: path.write_text("".join(line + "\n" for line in lines)))

    def save(
        self, policy: nn.Module, optimizer: torch.optim.Optimizer, figures: Mapping[str, Any]
    ) -> None:
        """Add a step's line, then write the state that goes on after it."""
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
        """Keep the policy as a model directory in float32, as it was pushed."""
        directory = self.path / "weights" / f"{self.steps:05}"
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
        """Write a step's responses with their log-probs, rewards and problems."""
        pairs = [(group, choice) for group in groups for choice in group.choices]
        identity = identity_of(model)
        legend = Legend(
            vocab_size=json.loads((model / "config.json").read_text())["vocab_size"],
            model=identity.model,
            template=identity.template,
            versions=(version,),
            end_reasons=ENDS,
            strategies=(),
        )
        arrays = tensors_of("responses", _responses(groups, max_tokens))
        arrays["logprobs"] = np.array([p for _, c in pairs for p in c.logprobs], np.float32)
        arrays["rewards"] = np.array([r for group in groups for r in group.rewards], np.float32)
        arrays["problems"] = np.array([group.prompt.number for group, _ in pairs], np.int64)
        metadata = {"legend": msgspec.json.encode(legend).decode()}
        _write(
            self.path / "responses" / f"{self.steps:05}.safetensors",
            lambda path: save_arrays(arrays, path, metadata),
        )


def load_samples(file: Path) -> SampleSet:
    """Read a step's responses as the server's own record holds them, without verifications."""
    with safe_open(file, "np") as opened:
        legend = msgspec.json.decode(opened.metadata()["legend"], type=Legend)
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    empty = {f.name: np.zeros(0, str(f.type)[11:-1]) for f in fields(Verifications)}
    samples = SampleSet(legend, parsed(Responses, "responses", tensors), Verifications(**empty))
    samples.check()
    return samples


def differences(first: Path, second: Path) -> list[str]:
    """Return what differs between the bits of two runs: responses with their log-probs and rewards,
    and the weights with their optimizer.
    """
    names = {"state.safetensors"}
    names |= {
        f"responses/{file.name}" for run in (first, second) for file in run.glob("responses/*")
    }
    found = []
    for name in sorted(names):
        if not ((first / name).exists() and (second / name).exists()):
            found.append(f"{name} is not in both")
            continue
        ours, theirs = load_file(first / name), load_file(second / name)
        found += [
            f"{name}: {tensor}"
            for tensor in sorted(ours.keys() | theirs.keys())
            if tensor not in ours or tensor not in theirs or not _same(ours[tensor], theirs[tensor])
        ]
    return found


def _same(ours: np.ndarray[Any, Any], theirs: np.ndarray[Any, Any]) -> bool:
    """Compare bits: NaN is equal to itself, and -0.0 differs from 0.0."""
    alike = ours.dtype == theirs.dtype and ours.shape == theirs.shape
    return alike and ours.tobytes() == theirs.tobytes()


def _responses(groups: Sequence[Group], max_tokens: int) -> Responses:
    triples = [(i, group, c) for i, group in enumerate(groups) for c in group.choices]
    rows = [group.prompt.token_ids + choice.token_ids for _, group, choice in triples]
    count = len(rows)

    def of_choices(values: Sequence[int], dtype: type[Any]) -> np.ndarray[Any, Any]:
        return np.array(values, dtype)

    return Responses(
        token_T=np.concatenate([np.array(row, np.int32) for row in rows]),
        start_N=np.cumsum([0, *map(len, rows)])[:-1].astype(np.int64),
        prompt_len_N=of_choices([len(g.prompt.token_ids) for _, g, _ in triples], np.int32),
        group_N=of_choices([i for i, _, _ in triples], np.int32),
        seed_N=of_choices([choice.seed for _, _, choice in triples], np.uint64),
        temperature_N=np.ones(count, np.float32),
        top_p_N=np.ones(count, np.float32),
        min_p_N=np.zeros(count, np.float32),
        top_k_N=np.zeros(count, np.int32),
        max_tokens_N=np.full(count, max_tokens, np.int32),
        end_N=of_choices([ENDS.index(choice.finish_reason) for _, _, choice in triples], np.uint8),
        span_request_S=np.arange(count, dtype=np.int32),
        span_start_S=np.zeros(count, np.int32),
        span_version_S=np.zeros(count, np.int32),
    )


def accept_length(choices: Sequence[Choice]) -> float | None:
    """Return the tokens per step that had a draft, the bonus token included."""
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
