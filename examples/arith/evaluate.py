"""Step 5: measure the pair on held-out problems, fit the calibration table, and write
`figures.json` and the model card.

Accept lengths replay draft-and-verify cycles on recorded samples (see `tree.py`); the last of the
samples fit the table, the first are measured.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import safetensors
import tokenizers
import torch
import transformers
from card import CHAINS, model_card
from corpus import Batcher, Sequences
from drafter_model import DrafterModel, load_drafter
from figures import record_figures
from sample import sample_problems
from target_model import TargetModel, load_target
from tokenizers import Tokenizer
from tree import (
    Calibration,
    Settings,
    Walk,
    chain_figures,
    export_calibration,
    fit_calibration,
    replay,
)

from tlt_server.demo import task


def length_figures(sequences: Sequences, rewards: torch.Tensor) -> dict:
    lengths = (sequences.offsets.diff() - sequences.prompt_lengths).float()
    quantiles = {
        f"p{percent}": round(float(torch.quantile(lengths, percent / 100)), 1)
        for percent in (50, 90, 99)
    }
    kinds = [task.problem(int(seed)).kind for seed in sequences.seeds]
    deciles = [
        {"tokens_up_to": int(lengths[part].max()), "solved": round(float(rewards[part].mean()), 4)}
        for part in lengths.argsort(stable=True).chunk(10)
    ]
    by_kind = {
        kind: {
            "share": round(len(part) / len(kinds), 4),
            "solved": round(float(rewards[part].mean()), 4),
        }
        for kind in sorted(set(kinds))
        for part in [torch.tensor([i for i, k in enumerate(kinds) if k == kind])]
    }
    return {
        "samples": len(sequences),
        "solved": round(float(rewards.mean()), 4),
        "solved_by_kind": by_kind,
        "solved_by_length_decile": deciles,
        "tokens": quantiles | {"max": int(lengths.max()), "mean": round(float(lengths.mean()), 1)},
        "share_at_least_2000_tokens": round(float((lengths >= 2000).float().mean()), 5),
        "share_at_cap": round(float((lengths >= task.RESPONSE_TOKEN_CAP).float().mean()), 5),
    }


@torch.inference_mode()
def entropy_per_token(target: TargetModel, batcher: Batcher, device: str) -> float:
    total, count = 0.0, 0
    for batch in batcher.epoch(0):
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logs = target(batch.tokens_BT)[:, :-1].log_softmax(-1)
        mask = batch.response_mask()
        total += float((-(logs.exp() * logs).sum(-1) * mask).sum())
        count += int(mask.sum())
    return total / count


def accept_lengths(
    drafter: DrafterModel,
    target: TargetModel,
    table: Calibration,
    data: Sequences,
    options: argparse.Namespace,
    temperature: float,
) -> dict:
    batcher = Batcher(data, options.replay_tokens, options.device, buckets=(128, 512, 2816))
    figures = {}
    for rows in options.trees:
        walk = Walk()
        for batch in batcher.epoch(0):
            replay(
                drafter,
                target,
                table,
                batch,
                Settings(rows, options.depth, options.width, temperature),
                walk,
            )
        figures[str(rows)] = walk.summary()
        print(
            f"{time.strftime('%H:%M:%S')} T={temperature} rows {rows}: {figures[str(rows)]}",
            flush=True,
        )
    return figures


def accept_chains(
    drafter: DrafterModel, target: TargetModel, data: Sequences, options: argparse.Namespace
) -> dict:
    batcher = Batcher(data, options.replay_tokens, options.device, buckets=(128, 512, 2816))
    figures = {}
    for depth in CHAINS:
        figures[str(depth)] = chain_figures(drafter, target, batcher.epoch(0), depth)
        print(f"{time.strftime('%H:%M:%S')} chain of {depth}: {figures[str(depth)]}", flush=True)
    return figures


def measure_drafter(options: argparse.Namespace) -> None:
    """Measure another drafter of the same target on recorded responses; what the figures say of the
    target stays.
    """
    target = load_target(options.pair / "target", options.device)
    drafter = load_drafter(options.pair / "drafter", target.config, options.device)
    data = Sequences.load(options.recorded)
    ids = torch.arange(len(data))
    held = data.select(ids[-options.calibration_samples :])
    measured = data.select(ids[: options.replayed])
    batches = list(Batcher(held, 8_192, options.device).epoch(0))
    table, among = fit_calibration(drafter, target, batches, options.depth)
    export_calibration(table, options.pair / "drafter")
    evaluation = json.loads((options.pair / "figures.json").read_text())["evaluation"]
    evaluation |= {
        "among_children": among,
        "calibration_samples": len(held),
        "drafter_measured": {"machine": options.machine, "samples": len(measured)},
    }
    evaluation["T=1"] |= {
        "accept": accept_lengths(drafter, target, table, measured, options, 1.0),
        "accept_chain": accept_chains(drafter, target, measured, options),
    }
    write_figures(options, evaluation)


def write_figures(options: argparse.Namespace, evaluation: dict) -> None:
    record_figures(options.pair / "figures.json", "evaluation", evaluation)
    (options.pair / "README.md").write_text(
        model_card(json.loads((options.pair / "figures.json").read_text()))
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pair", type=Path, default=Path("tlt_server/demo/pair"))
    parser.add_argument("--samples", type=int, default=20_000, help="eval problems at T=1")
    parser.add_argument(
        "--greedy-samples", type=int, default=4_000, help="eval problems at T=0; 0: none"
    )
    parser.add_argument(
        "--calibration-samples",
        type=int,
        default=8_000,
        help="the last of --samples, kept out of the accept lengths",
    )
    parser.add_argument(
        "--replayed",
        type=int,
        default=3_000,
        help="samples replayed per accept length, from the first",
    )
    parser.add_argument("--depth", type=int, default=7)
    parser.add_argument("--width", type=int, default=8, help="nodes expanded per level")
    parser.add_argument(
        "--trees", type=int, nargs="+", default=[8, 16, 32], help="rows of the trees replayed"
    )
    parser.add_argument(
        "--recorded",
        type=Path,
        help="measure the drafter on these responses of the target; its own figures stay",
    )
    parser.add_argument("--replay-tokens", type=int, default=400_000)
    parser.add_argument("--cap", type=int, default=task.RESPONSE_TOKEN_CAP)
    parser.add_argument(
        "--card-only",
        action="store_true",
        help="write the model card from figures.json and measure nothing",
    )
    parser.add_argument(
        "--machine",
        default=f"one {torch.cuda.get_device_name()}" if torch.cuda.is_available() else "a CPU",
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    if options.card_only:
        (options.pair / "README.md").write_text(
            model_card(json.loads((options.pair / "figures.json").read_text()))
        )
        return
    torch.set_float32_matmul_precision("high")
    if options.recorded:
        measure_drafter(options)
        return
    started = time.monotonic()
    target = load_target(options.pair / "target", options.device)
    drafter = load_drafter(options.pair / "drafter", target.config, options.device)
    tokenizer = Tokenizer.from_file(str(options.pair / "target" / "tokenizer.json"))
    seeds = list(task.EVAL_SEEDS[: options.samples])
    data, rewards = sample_problems(target, tokenizer, seeds, 1.0, options.cap)
    hot = length_figures(data, rewards)
    print(f"{time.monotonic() - started:.0f}s {hot}", flush=True)
    measured = data.select(torch.arange(options.replayed))
    held = data.select(torch.arange(options.samples - options.calibration_samples, options.samples))
    hot["entropy_per_token"] = round(
        entropy_per_token(target, Batcher(data, 65_536, options.device), options.device), 4
    )
    batches = list(Batcher(held, 32_768, options.device).epoch(0))
    table, among = fit_calibration(drafter, target, batches, options.depth)
    export_calibration(table, options.pair / "drafter")
    print(f"{time.monotonic() - started:.0f}s among children: {json.dumps(among)}", flush=True)
    hot["accept"] = accept_lengths(drafter, target, table, measured, options, 1.0)
    hot["accept_chain"] = accept_chains(drafter, target, measured, options)
    cold = None
    if options.greedy_samples:
        greedy, greedy_rewards = sample_problems(
            target, tokenizer, seeds[: options.greedy_samples], 0.0, options.cap
        )
        cold = length_figures(greedy, greedy_rewards)
        print(f"{time.monotonic() - started:.0f}s {cold}", flush=True)
        greedy_measured = greedy.select(torch.arange(min(options.replayed, len(greedy)) // 2))
        cold["accept"] = accept_lengths(drafter, target, table, greedy_measured, options, 0.0)
    evaluation = {
        "machine": options.machine,
        "versions": f"torch {torch.__version__}, transformers {transformers.__version__}, "
        f"tokenizers {tokenizers.__version__}, safetensors {safetensors.__version__}",
        "depth": options.depth,
        "width": options.width,
        "calibration_samples": options.calibration_samples,
        "target_parameters": sum(p.numel() for p in target.parameters()),
        "target_layers": target.config.num_hidden_layers,
        "drafter_parameters": sum(p.numel() for p in drafter.parameters()),
        "draft_vocab": len(drafter.d2t),
        "among_children": among,
        "T=1": hot,
        "T=0": cold,
    }
    write_figures(options, evaluation)
    print(f"{time.monotonic() - started:.0f}s written to {options.pair}", flush=True)


if __name__ == "__main__":
    main()
