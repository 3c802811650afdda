"""Drafters of several objectives, trained alike and replayed side by side.

The states of the target are computed once, before any training, and packs are the same for all, cut
for the longest unrolled branch. Chains of 7 are replayed whole, so no figure depends on how well a
drafter's survival was estimated. Costs at 7B shapes are those in `benchmarks/results`.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import sys
import time
from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple

import torch

from examples.grpo.foreign import record, tlt_drafter
from examples.grpo.rollouts import KINDS
from tlt_server.bench.record import entry_of, without_folder, write_entry
from tlt_server.demo.workload import DRAFTER, TARGET
from tlt_server.drafter.data import TargetLimits, read_documents
from tlt_server.drafter.records import PAGE_SIZE, load_record
from tlt_server.models.config import ModelConfig, read_json
from tlt_server.models.draft_checkpoint import feature_layers
from tlt_server.trainer import figures
from tlt_server.trainer.evaluate import ReplayStage, Task, Walked, evaluate
from tlt_server.trainer.network import load_trainable
from tlt_server.trainer.objectives import OBJECTIVES, Objective, make_objective
from tlt_server.trainer.pack import Cursor, Packer
from tlt_server.trainer.plans import PinnedPlan
from tlt_server.trainer.prefill import Prefill, load_prefill
from tlt_server.trainer.recompute import Document, Recomputed, RecomputedFeatures
from tlt_server.trainer.replay import ReplayedDrafter
from tlt_server.trainer.step import AdamWSettings, Trainer, default_rate
from tlt_server.wire.records import Strategy, parse_strategy

CHAIN = parse_strategy("eagle:7x1x8")
KEPT_BYTES = 8 << 30  # limit of the states in memory; the default record takes 1 GB
UNROLLED = 7  # steps for which packs are cut
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


class WholeChains(PinnedPlan):
    """All drafts of a chain, also those that hardly survive."""

    floored = False


class Trained(NamedTuple):
    """One drafter and what its training took, without reading packs."""

    name: str
    directory: Path
    tokens: int
    seconds: float
    tokens_per_s: int  # from the second step on


def compare(asked: argparse.Namespace) -> int:
    torch.set_num_threads(asked.threads)
    segments = sorted((asked.out / "responses").glob("*.segment"))
    trained_on, judged_on = segments if len(segments) == 2 else record(asked, KINDS)
    start = asked.drafter or untrained(asked.out / "untrained", trained_on)
    config = ModelConfig.read(TARGET)
    target = load_prefill(TARGET, asked.device, feature_layers(start, config), config)
    limits = TargetLimits(config.vocab_size, config.max_position)
    documents = read_documents([trained_on], limits, TARGET)
    source = Recomputed(target, documents, kept_bytes=KEPT_BYTES)
    began = time.perf_counter()
    for document, length in enumerate(source.lengths):
        source.read(document, 0, length)
    states_s = time.perf_counter() - began
    print(f"states of {source.computed} tokens: {states_s:.0f} s", flush=True)
    trained = [Trained("start", start, 0, 0.0, 0)]
    for acceptance in asked.acceptance:
        for name in OBJECTIVES:
            label = name if acceptance == "none" else f"{name}, {acceptance}"
            objective = make_objective(name, acceptance)
            trained.append(train(label, objective, start, source, target, asked))
            print(f"{label}: {trained[-1].seconds:.0f} s", flush=True)
    said = {
        "bench": "objectives",
        "device": asked.device,
        "start": "never trained" if asked.drafter is None else asked.drafter.name,
        "record_tokens": source.computed,
        "budget": asked.budget,
        "chain": CHAIN.name,
        "rows": rows(
            trained, judged_on, {prompt_of(each) for each in documents}, target, asked.device
        ),
    }
    show(said["rows"])
    (asked.out / "objectives.json").write_text(json.dumps(said, indent=1) + "\n")
    if asked.json:
        flags = [without_folder(argument) for argument in sys.argv[1:]]
        command = shlex.join(["python", "-m", "examples.grpo.objectives", *flags])
        on_gpu = asked.device == "cuda"
        write_entry(asked.json, entry_of(said, command, on_gpu=on_gpu, commit=asked.commit))
    return 0


def untrained(directory: Path, data: Path) -> Path:
    """Write a drafter with the shipped one's draft vocabulary size, unless it is there."""
    if not (directory / "config.json").exists():
        size = read_json(DRAFTER / "config.json")["draft_vocab_size"]
        tlt_drafter("init", "--data", data, "--draft-vocab", size, "--out", directory)
    return directory


def train(
    label: str,
    objective: Objective,
    start: Path,
    source: Recomputed,
    target: Prefill,
    asked: argparse.Namespace,
) -> Trained:
    """Train a copy of `start` on at least `asked.tokens` tokens and write it."""
    compute = torch.bfloat16 if asked.device == "cuda" else torch.float32
    network = load_trainable(start, target.model.config, compute=compute, device=asked.device)
    frozen = network.frozen(target.embedding_VH, target.head_rows(network.target_ids_C))
    steps = -(-asked.tokens // asked.budget)
    settings = AdamWSettings(
        lr=asked.lr or default_rate(target.model.hidden_size),
        warmup_steps=min(100, steps // 10),
        total_steps=steps,
    )
    trainer = Trainer(network, frozen, objective, settings)
    packer, cursor = Packer(source, asked.budget, UNROLLED, asked.seed), Cursor()
    step_s = []
    for _ in range(steps):
        pack, cursor = packer.next(cursor)
        pack = pack.to(network.device, compute)
        began = time.perf_counter()
        outcome = trainer.step([pack])
        step_s.append(time.perf_counter() - began)
        if not outcome.applied:
            raise ValueError(f"{label}: loss {outcome.loss:g} or its gradient is not finite")
    directory = asked.out / label.replace(", ", "-")
    directory.mkdir(exist_ok=True)
    shutil.copyfile(start / "config.json", directory / "config.json")
    network.save(directory)
    later = step_s[1:] or step_s
    rate = round(len(later) * asked.budget / sum(later))
    return Trained(label, directory, steps * asked.budget, sum(step_s), rate)


def prompt_of(document: Document) -> bytes:
    return document.token_T[~document.counted_T].tobytes()


def rows(
    trained: Sequence[Trained], judged_on: Path, known: Set[bytes], target: Prefill, device: str
) -> list[dict[str, Any]]:
    """Return the figures of each drafter, the first of which is the start, on the responses to
    prompts that are not `known`.
    """
    responses = load_record(judged_on, TARGET).samples.responses
    chosen = [
        n
        for n in range(len(responses))
        if responses.tokens(n)[: responses.prompt_len_N[n]].tobytes() not in known
    ]
    tasks = [
        Task(ReplayedDrafter.load(each.directory, target.model, device=device), WholeChains(CHAIN))
        for each in trained
    ]
    stage = ReplayStage(RecomputedFeatures(target), PAGE_SIZE)
    walks = evaluate(responses, chosen, tasks, stage)
    ms, rates = cycle_ms(CHAIN), training_rates()
    sums = [figures.by_response(walked) for walked in walks]
    found = []
    for each, walked, own in zip(trained, walks, sums, strict=True):
        length, name = figures.accept_length(walked), each.name.partition(",")[0]
        against = figures.paired(sums[1], own, responses.group_N).accept_length
        found.append(
            {
                "objective": each.name,
                "cycles": len(walked),
                "accept_length": round(length, 3),
                "against_first_trained": [round(x, 3) for x in against],
                "accepted_at_depth": at_depth(walked),
                "tokens": each.tokens,
                "seconds": round(each.seconds, 1),
                "tokens_per_s": each.tokens_per_s,
                "tokens_per_s_at_7b": round(1e3 * length / ms, 1),
                "trained_per_s_at_7b": rates.get(name),
            }
        )
    return found


def at_depth(walked: Walked) -> list[float]:
    return [round(share, 3) for share in figures.by_depth(walked, CHAIN.depth)]


def cycle_ms(chain: Strategy) -> float:
    """Return the milliseconds of a cycle of one request at 7B shapes, as measured."""
    entry = read_json(RESULTS / "cycle-gpu.json")
    return float(
        next(
            row["step_ms"]
            for row in entry["figures"]["rows"]
            if (row["strategy"], row["batch"], row["prompt"]) == (chain.name, 1, 128)
        )
    )


def training_rates() -> dict[str, int]:
    """Return the tokens per second of training a drafter of 7B shapes, by objective."""
    entry = read_json(RESULTS / "training-gpu.json")
    return {name: row["tokens_per_s"] for name, row in entry["figures"]["objectives"].items()}


def show(found: Sequence[dict[str, Any]]) -> None:
    """Print the rows as a table in markdown."""
    print("| objective | accept length | by depth, % | trained tokens/s | s | tok/s at 7B cost |")
    print("|---|---|---|---|---|---|")
    for row in found:
        depths = ", ".join(f"{100 * share:.0f}" for share in row["accepted_at_depth"])
        print(
            f"| {row['objective']} | {row['accept_length']:.2f} | {depths} | "
            f"{row['tokens_per_s']} | {row['seconds']:.0f} | {row['tokens_per_s_at_7b']:.0f} |"
        )
