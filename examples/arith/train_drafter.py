"""Step 4: train the EAGLE-3 drafter on the target's own samples, with training-time test and the
target's full distributions as teacher.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import torch
from checkpoint import load_state, save_state
from corpus import Batch, Batcher, Sequences
from drafter_model import DrafterConfig, DrafterModel, export_drafter, load_drafter
from figures import record_figures
from target_model import TargetModel, load_target
from train_target import learning_rate, optimizer_of
from tree import fit_calibration

from tlt_server.trainer import losses


def drafter_loss(
    drafter: DrafterModel,
    target: TargetModel,
    batch: Batch,
    steps: int,
    decay: float,
    variation: float,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """(the training loss, total variation of each step)."""
    with torch.no_grad():
        states = target.hidden_states(batch.tokens_BT)
        teacher_logits = target.logits(states[-1])
        teacher = teacher_logits.index_select(-1, drafter.kept_ids).softmax(-1)
        covered = drafter.t2d[teacher_logits.argmax(-1)]
    per_step, variations = [], []
    for step, h in enumerate(drafter.unroll(states[0], drafter.fuse(states), steps)):
        # Roots r = 1 .. T-2-step: the slot at r + step is taught by the target's output there.
        taught = slice(1 + step, batch.tokens_BT.shape[1] - 1)
        weights = batch.drafted(step) * covered[:, taught]
        logits = drafter.logits(h)
        variations.append(_mean(losses.total_variation(logits, teacher[:, taught]), weights))
        entropy = _mean(losses.soft_cross_entropy(logits, teacher[:, taught]), weights)
        per_step.append(entropy + variation * variations[-1])
    factors = [decay**step for step in range(steps)]
    loss = sum(factor * each for factor, each in zip(factors, per_step, strict=True)) / sum(factors)
    return loss, [v.detach() for v in variations]


def _mean(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return (values * weights).sum() / weights.sum().clamp(min=1e-6)


def frequent_ids(data: Sequences, vocab_size: int, size: int) -> torch.Tensor:
    """The `size` most frequent ids of the samples' responses, ties to the lower id."""
    counts = torch.bincount(data.tokens.long(), minlength=vocab_size)
    return counts.sort(descending=True, stable=True).indices[:size]


def continue_from(drafter: DrafterModel, earlier: DrafterModel) -> None:
    """Take over an earlier drafter's weights. `lm_head` stays fresh: its rows are this draft
    vocabulary's.
    """
    state = dict(earlier.named_parameters())
    drafter.load_state_dict({name: state[name] for name in state if "lm_head" not in name}, False)


def chain_estimate(
    drafter: DrafterModel, target: TargetModel, batches: list[Batch], depth: int
) -> float:
    """Accept length of chains of `depth` drafts at T=1. It follows from how often each step's best
    draft is right along the true path, as if steps were independent; replayed cycles differ by
    about 1 %.
    """
    _, among = fit_calibration(drafter, target, batches, depth)
    right = [among[f"step_{step}"]["1"] for step in range(1, depth + 1)]
    return 1 + sum(math.prod(right[:drafts]) for drafts in range(1, depth + 1))


class StopAt:
    """Tells when a chain of drafts reaches an accept length on held-out samples."""

    def __init__(self, options: argparse.Namespace, held_out: Sequences) -> None:
        self.length, self.every, self.depth = (
            options.stop_at,
            options.check_every,
            options.test_steps,
        )
        self.batches = list(Batcher(held_out, 16_384, options.device).epoch(0))

    def reached(self, drafter: DrafterModel, target: TargetModel, step: int) -> bool:
        if step % self.every:
            return False
        length = chain_estimate(drafter, target, self.batches, self.depth)
        print(f"step {step}: a chain of {self.depth} has accept length {length:.3f}", flush=True)
        return length >= self.length


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, default=Path("tlt_server/demo/pair/target"))
    parser.add_argument(
        "--samples", type=Path, nargs="+", default=[Path("build/arith/samples.safetensors")]
    )
    parser.add_argument("--out", type=Path, default=Path("tlt_server/demo/pair/drafter"))
    parser.add_argument(
        "--start-from",
        type=Path,
        help="a pair whose drafter to continue from; its LM head starts fresh",
    )
    parser.add_argument(
        "--stop-at",
        type=float,
        metavar="LENGTH",
        help="stop when a chain of --test-steps has this accept length [tokens per cycle]",
    )
    parser.add_argument(
        "--check-every", type=int, default=10, help="steps between two checks of --stop-at"
    )
    parser.add_argument(
        "--held-out", type=int, default=128, help="last samples, kept for the checks of --stop-at"
    )
    parser.add_argument("--checkpoint", type=Path, default=Path("build/arith/drafter"))
    parser.add_argument("--steps", type=int, default=6_000, help="optimizer steps")
    parser.add_argument(
        "--time-limit-s", type=float, default=400.0, help="the schedule is stretched to end by then"
    )
    parser.add_argument(
        "--test-steps", type=int, default=7, help="training-time test: steps drafted ahead"
    )
    parser.add_argument(
        "--decay",
        type=float,
        default=0.9,
        help="weight of each later step relative to the one before",
    )
    parser.add_argument(
        "--variation", type=float, default=0.5, help="weight of the total-variation term"
    )
    parser.add_argument("--tokens-per-batch", type=int, default=32_768)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--intermediate", type=int, default=DrafterConfig.intermediate_size)
    parser.add_argument("--draft-vocab", type=int, default=DrafterConfig.draft_vocab_size)
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    target = load_target(options.target, options.device).requires_grad_(False)
    data = Sequences.concatenate([Sequences.load(path) for path in options.samples])
    kept = frequent_ids(data, target.config.vocab_size, options.draft_vocab)
    drafter = DrafterModel(
        DrafterConfig(target.config, options.intermediate, options.draft_vocab), kept
    ).to(options.device)
    if options.start_from:
        continue_from(drafter, load_drafter(options.start_from / "drafter", target.config, "cpu"))
    optimizer = optimizer_of(drafter, options.lr, fused=options.device == "cuda")
    record = load_state(options.checkpoint, drafter, optimizer) or {
        "step": 0,
        "seconds": 0.0,
        "epoch": 0,
        "tokens": 0,
    }
    loss_of = torch.compile(drafter_loss, dynamic=True) if options.compile else drafter_loss
    stop_at = None
    if options.stop_at:
        ids = torch.arange(len(data))
        stop_at = StopAt(options, data.select(ids[-options.held_out :]))
        data = data.select(ids[: -options.held_out])
    batcher = Batcher(data, options.tokens_per_batch, options.device, options.seed)
    size = sum(p.numel() for p in drafter.parameters())
    print(
        f"{size} parameters, {len(data)} samples, {len(data.tokens)} tokens, {record}", flush=True
    )
    before, started, last_print, last_save = (
        record["seconds"],
        time.monotonic(),
        0.0,
        time.monotonic(),
    )
    finished = False
    while not finished:
        record["epoch"] += 1
        for batch in batcher.epoch(record["epoch"]):
            record["seconds"] = before + time.monotonic() - started
            progress = max(record["step"] / options.steps, record["seconds"] / options.time_limit_s)
            if progress >= 1 or (stop_at and stop_at.reached(drafter, target, record["step"])):
                finished = True
                break
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(progress, options.lr)
            with torch.autocast(options.device, torch.bfloat16):
                loss, variations = loss_of(
                    drafter, target, batch, options.test_steps, options.decay, options.variation
                )
            loss.backward()
            torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            record["step"] += 1
            record["tokens"] += batch.tokens_BT.numel()
            if time.monotonic() - last_print > 10 or record["step"] == 3:
                last_print = time.monotonic()
                by_step = " ".join(f"{v:.3f}" for v in torch.stack(variations).tolist())
                print(
                    f"{record['seconds']:6.1f}s step {record['step']} epoch {record['epoch']} "
                    f"tokens {record['tokens'] / 1e6:.0f}M loss {loss.item():.4f} variation by "
                    f"step {by_step} width {batch.tokens_BT.shape[1]}",
                    flush=True,
                )
            if time.monotonic() - last_save > 60:
                last_save = time.monotonic()
                save_state(options.checkpoint, drafter, optimizer, record)
    save_state(options.checkpoint, drafter, optimizer, record)
    export_drafter(drafter, options.out)
    record |= {
        "seed": options.seed,
        "samples": len(data),
        "stop_at": options.stop_at,
        "test_steps": options.test_steps,
        "lr": options.lr,
    }
    record_figures(options.out.parent / "figures.json", "drafter_training", record)
    print(f"exported to {options.out} after {record}", flush=True)


if __name__ == "__main__":
    main()
