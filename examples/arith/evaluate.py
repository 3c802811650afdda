"""Step 5: measure the pair on held-out problems, fit the calibration table, and write `figures.json` and the model card.

Accept lengths replay draft-and-verify cycles on recorded samples (see `tree.py`); one half of the samples fits the table, the other is measured.
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
from corpus import Batcher, Sequences
from drafter_model import DrafterModel, load_drafter
from figures import record_figures
from sample import sample_problems
from safetensors.torch import save_file
from target_model import TargetModel, load_target
from tokenizers import Tokenizer
from tree import Calibration, Walk, fit_calibration, replay

from tlt_server.demo import task


def length_figures(sequences: Sequences, rewards: torch.Tensor) -> dict:
    lengths = (sequences.offsets.diff() - sequences.prompt_lengths).float()
    quantiles = dict(zip(("p50", "p90", "p99"), torch.quantile(lengths, torch.tensor([0.5, 0.9, 0.99])).tolist()))
    kinds = [task.problem(int(seed)).kind for seed in sequences.seeds]
    deciles = [
        {"tokens_up_to": int(lengths[part].max()), "solved": round(float(rewards[part].mean()), 4)}
        for part in lengths.argsort(stable=True).chunk(10)
    ]
    by_kind = {
        kind: {"share": round(len(part) / len(kinds), 4), "solved": round(float(rewards[part].mean()), 4)}
        for kind in sorted(set(kinds))
        for part in [torch.tensor([i for i, k in enumerate(kinds) if k == kind])]
    }
    return {
        "samples": len(sequences),
        "solved": round(float(rewards.mean()), 4),
        "solved_by_kind": by_kind,
        "solved_by_length_decile": deciles,
        "tokens": {name: round(value, 1) for name, value in quantiles.items()} | {"max": int(lengths.max()), "mean": round(float(lengths.mean()), 1)},
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
    drafter: DrafterModel, target: TargetModel, table: Calibration, data: Sequences, options: argparse.Namespace, temperature: float
) -> dict:
    batcher = Batcher(data, options.replay_tokens, options.device, buckets=(128, 512, 2816))
    figures = {}
    for rows in (8, 16, 32):
        walk = Walk()
        for batch in batcher.epoch(0):
            replay(drafter, target, table, batch, rows, options.depth, options.width, temperature, walk)
        figures[str(rows)] = walk.summary()
        print(f"{time.strftime('%H:%M:%S')} T={temperature} rows {rows}: {figures[str(rows)]}", flush=True)
    return figures


def card(figures: dict) -> str:
    """The model card, every number from `figures`."""
    t, d, e = figures["target_training"], figures["drafter_training"], figures["evaluation"]
    hot, cold = e["T=1"], e["T=0"]
    tokens = hot["tokens"]
    goals = [
        ("accept length, 16 rows, depth 7, T=1", hot["accept"]["16"]["accept_length"], ">= 3.5", hot["accept"]["16"]["accept_length"] >= 3.5),
        ("accept length, 32 rows, depth 7, T=1", hot["accept"]["32"]["accept_length"], ">= 4.8", hot["accept"]["32"]["accept_length"] >= 4.8),
        ("solved at T=1", hot["solved"], "0.40 to 0.70", 0.4 <= hot["solved"] <= 0.7),
        ("p99 / p50 of response tokens", round(tokens["p99"] / tokens["p50"], 1), ">= 10", tokens["p99"] >= 10 * tokens["p50"]),
        ("share ended by the cap", hot["share_at_cap"], "<= 0.01", hot["share_at_cap"] <= 0.01),
        ("entropy per token (nats)", hot["entropy_per_token"], "0.1 to 0.4", 0.1 <= hot["entropy_per_token"] <= 0.4),
    ]
    lines = [
        "# The demo pair",
        "",
        "A small Qwen2 target that does written-out arithmetic, and its EAGLE-3 drafter. Made by the scripts in `examples/arith`; every figure below",
        "was measured by `evaluate.py` and stands in `figures.json`. The target imitates careful and hasty writers on purpose, so that it solves only",
        "a part of the problems and reinforcement learning has room.",
        "",
        f"Measured on {e['machine']}, {e['versions']}; {hot['samples']} eval problems at T=1, {cold['samples']} at T=0. Target bf16 weights and",
        "bf16 matrix products; drafter and trees in float32 from the bf16 checkpoint.",
        "",
        "| goal | measured | wanted | reached |",
        "|---|---|---|---|",
        *(f"| {name} | {value} | {wanted} | {'yes' if ok else '**no**'} |" for name, value, wanted, ok in goals),
        "",
        "| | T=1 | T=0 |",
        "|---|---|---|",
        f"| solved | {hot['solved']} | {cold['solved']} |",
        *(f"| response tokens {name} | {tokens[name]} | {cold['tokens'][name]} |" for name in ("p50", "p90", "p99", "max", "mean")),
        f"| responses of 2,000 tokens or more | {hot['share_at_least_2000_tokens']} | {cold['share_at_least_2000_tokens']} |",
        f"| ended by the cap of {task.RESPONSE_TOKEN_CAP} | {hot['share_at_cap']} | {cold['share_at_cap']} |",
        f"| entropy, nats per token | {hot['entropy_per_token']} | |",
        *(
            f"| accept length (tokens per cycle, bonus included), depth {e['depth']}, {rows} rows | {hot['accept'][rows]['accept_length']} "
            f"| {cold['accept'][rows]['accept_length']} |"
            for rows in ("8", "16", "32")
        ),
        "",
        f"Trees: shared noise, {e['width']} nodes expanded per level, rows include the root, chosen by the calibrated chance. A response's last cycle",
        "counts only the tokens left.",
        "",
        "| share of cycles that accept at least this deep, T=1 | " + " | ".join(str(i + 1) for i in range(e["depth"])) + " |",
        "|---" * (e["depth"] + 1) + "|",
        *(f"| {rows} rows | " + " | ".join(f"{a:.3f}" for a in hot["accept"][rows]["accepted_at_depth"]) + " |" for rows in ("8", "16", "32")),
        "",
        "| the target's token is among k children (parent on the path), T=1 | " + " | ".join(str(i + 1) for i in range(e["depth"])) + " |",
        "|---" * (e["depth"] + 1) + "|",
        *(f"| k = {k} | " + " | ".join(f"{e['among_children'][f'step_{i + 1}'][k]:.3f}" for i in range(e["depth"])) + " |" for k in ("1", "2", "4", "8")),
        "",
        "| kind | share | solved, T=1 | solved, T=0 |",
        "|---|---|---|---|",
        *(f"| {k} | {v['share']} | {v['solved']} | {cold['solved_by_kind'][k]['solved']} |" for k, v in hot["solved_by_kind"].items()),
        "",
        "| length decile, T=1: up to tokens | " + " | ".join(str(x["tokens_up_to"]) for x in hot["solved_by_length_decile"]) + " |",
        "|---" * 11 + "|",
        "| solved | " + " | ".join(f"{x['solved']:.3f}" for x in hot["solved_by_length_decile"]) + " |",
        "",
        f"Target: {e['target_parameters']} parameters, {e['target_layers']} layers; {t['step']} steps over {t['tokens'] / 1e6:.0f}M tokens (padding",
        f"included) of {t['documents']} written solutions in {t['seconds']:.0f} s, seed {t['seed']}, peak learning rate {t['lr']}.",
        f"Drafter: {e['drafter_parameters']} parameters, draft vocabulary {e['draft_vocab']}; {d['step']} steps over {d['tokens'] / 1e6:.0f}M tokens of",
        f"{d['samples']} samples of the target at T=1 in {d['seconds']:.0f} s, {d['test_steps']} training-time-test steps, seed {d['seed']}, peak learning "
        f"rate {d['lr']}.",
        "Seeds: training problems and sampling noise from `TRAIN_SEEDS`, evaluation from `EVAL_SEEDS` of `tlt_server/demo/task.py`, disjoint.",
        "",
        "`drafter/calibration.safetensors`: `survival` [phase, rank, gap bucket] = P(child is the target's token | its parent is on the path) at T=1;",
        "phase 0 = children of the root; gap = distance of perturbed values to the best child (of the best child: to the second); bucket = number of",
        f"`gap_edges` at or below the gap. Fitted on {e['calibration_samples']} samples of eval problems that the accept lengths do not use.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", type=Path, default=Path("tlt_server/demo/pair"))
    parser.add_argument("--samples", type=int, default=20_000, help="eval problems at T=1")
    parser.add_argument("--greedy-samples", type=int, default=4_000, help="eval problems at T=0")
    parser.add_argument("--calibration-samples", type=int, default=8_000, help="the last of --samples, kept out of the accept lengths")
    parser.add_argument("--replayed", type=int, default=3_000, help="samples replayed per accept length, from the first")
    parser.add_argument("--depth", type=int, default=7)
    parser.add_argument("--width", type=int, default=8, help="nodes expanded per level")
    parser.add_argument("--replay-tokens", type=int, default=400_000)
    parser.add_argument("--cap", type=int, default=task.RESPONSE_TOKEN_CAP)
    parser.add_argument("--machine", default="one NVIDIA H200" if torch.cuda.is_available() else "a CPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    started = time.monotonic()
    target = load_target(options.pair / "target", options.device)
    drafter = load_drafter(options.pair / "drafter", target.config, options.device)
    tokenizer = Tokenizer.from_file(str(options.pair / "target" / "tokenizer.json"))
    seeds = list(task.EVAL_SEEDS[: options.samples])
    data, rewards = sample_problems(target, tokenizer, seeds, 1.0, options.cap)
    hot = length_figures(data, rewards)
    print(f"{time.monotonic() - started:.0f}s {hot}", flush=True)
    greedy, greedy_rewards = sample_problems(target, tokenizer, seeds[: options.greedy_samples], 0.0, options.cap)
    cold = length_figures(greedy, greedy_rewards)
    print(f"{time.monotonic() - started:.0f}s {cold}", flush=True)
    measured = data.select(torch.arange(options.replayed))
    held = data.select(torch.arange(options.samples - options.calibration_samples, options.samples))
    hot["entropy_per_token"] = round(entropy_per_token(target, Batcher(data, 65_536, options.device), options.device), 4)
    batches = list(Batcher(held, 32_768, options.device).epoch(0))
    table, among = fit_calibration(drafter, target, batches, options.depth)
    save_file(
        {"survival": table.survival.cpu().contiguous(), "gap_edges": table.gap_edges.cpu().float().contiguous()},
        options.pair / "drafter" / "calibration.safetensors",
    )
    print(f"{time.monotonic() - started:.0f}s among children: {json.dumps(among)}", flush=True)
    hot["accept"] = accept_lengths(drafter, target, table, measured, options, 1.0)
    cold["accept"] = accept_lengths(drafter, target, table, greedy.select(torch.arange(min(options.replayed, len(greedy)) // 2)), options, 0.0)
    evaluation = {
        "machine": options.machine,
        "versions": f"torch {torch.__version__}, transformers {transformers.__version__}, tokenizers {tokenizers.__version__}, "
        f"safetensors {safetensors.__version__}",
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
    record_figures(options.pair / "figures.json", "evaluation", evaluation)
    (options.pair / "README.md").write_text(card(json.loads((options.pair / "figures.json").read_text())))
    print(f"{time.monotonic() - started:.0f}s written to {options.pair}", flush=True)


if __name__ == "__main__":
    main()
