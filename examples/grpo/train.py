"""Train the demo's target with GRPO in plain PyTorch, against a server that drafts or does not.

    python -m examples.grpo.train --steps 20 --out build/grpo

A run is fixed by its seed: tokens, rewards and weights have the same bits with every
`--speculation`. See README.md.
"""

from __future__ import annotations

import argparse
import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean, quantiles
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import Qwen2ForCausalLM

from examples.grpo.adapt import ADAPTATIONS, STARTS, KeptDrafters, untrained
from examples.grpo.policy import CORRECTIONS, Update, optimizer_of, update
from examples.grpo.pushes import PaddedPushes, Pushes
from examples.grpo.record import RunDirectory, accept_length, acceptance_by_depth
from examples.grpo.rollouts import KINDS, Group, draw_prompts, load_tokenizer, roll_out
from tlt_client import Client
from tlt_server.demo.server import ServerProcess
from tlt_server.demo.workload import DRAFTER, TARGET

FEATURE_MB = 1024  # for the features that the server trains on
PADDED_FRACTION = "0.72"  # memory_fraction: the padded policy lies on the same GPU
FIXED = ("seed", "prompts", "group", "max_tokens", "minibatches", "lr", "clip", "threads", "train")
FIXED += ("correction", "quantization")


def arguments(*, needs_out: bool = True) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m examples.grpo.train", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--out", type=Path, required=needs_out, help="the run's directory")
    parser.add_argument("--resume", action="store_true", help="go on with the run in --out")
    parser.add_argument("--steps", type=int, default=20, help="steps of the whole run")
    parser.add_argument("--prompts", type=int, default=8, help="prompts per step")
    parser.add_argument("--group", type=int, default=8, help="responses per prompt")
    parser.add_argument("--max-tokens", type=int, default=400, help="tokens per response")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--kinds",
        default=",".join(KINDS),
        help=f"kinds of problem, with commas between: {', '.join(KINDS)}",
    )
    parser.add_argument("--minibatches", type=int, default=2, help="optimizer steps per step")
    parser.add_argument("--lr", type=float, default=3e-5, help="learning rate of AdamW")
    parser.add_argument(
        "--train",
        choices=("all", "norms"),
        default="all",
        help="weights that are trained; with norms alone a step is kept in a few KB",
    )
    parser.add_argument("--clip", type=float, default=0.2, help="clip range of the ratio")
    parser.add_argument(
        "--correction",
        choices=CORRECTIONS,
        default="ratio",
        help="of the difference between the server's log-probs and the policy's: the ratio is to "
        "the server's; to the policy's, with truncated importance weights; none",
    )
    parser.add_argument("--threads", type=int, default=1, help="threads of the policy's update")
    parser.add_argument(
        "--speculation",
        choices=ADAPTATIONS,
        default="frozen",
        help="the drafter: off; frozen; adaptive: trained between two steps by this command; spot: "
        "trained by the server while the policy is updated",
    )
    _add_drafter(parser)
    parser.add_argument("--keep-every", type=int, default=10, help="keep each n-th step's weights")
    parser.add_argument("--url", help="a server with the channel http; without it one is started")
    parser.add_argument(
        "--quantization",
        choices=("auto", "none", "fp8"),
        default="auto",
        help="of a started server",
    )
    return parser


def _add_drafter(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--strategy", help="pin one, such as eagle:7x4x16, instead of the policy")
    parser.add_argument("--model", type=Path, default=TARGET, help="directory of the first policy")
    parser.add_argument("--drafter", type=Path, default=DRAFTER, help="directory of the drafter")
    parser.add_argument(
        "--padded",
        type=Path,
        help="directory of `tlt bench pad`: the server runs the pair in its shapes, at their cost",
    )
    parser.add_argument(
        "--start",
        choices=STARTS,
        default="given",
        help="first drafter: --drafter, or one that was never trained",
    )
    parser.add_argument(
        "--drafter-steps", type=int, default=8, help="training steps of the drafter after each step"
    )
    parser.add_argument("--drafter-lr", type=float, default=1e-4, help="their learning rate")
    parser.add_argument(
        "--drafter-window", type=int, default=4, help="steps whose responses it is trained on"
    )
    parser.add_argument(
        "--drafter-wait-s",
        type=float,
        default=0.0,
        help="with spot: wait as long for the end of a round before the next push, as if the "
        "policy's update took so long",
    )


def train(asked: argparse.Namespace) -> None:
    torch.set_num_threads(asked.threads)
    torch.use_deterministic_algorithms(True)
    kinds = _checked_kinds(asked)
    run = RunDirectory(asked.out, {n: getattr(asked, n) for n in FIXED}, resume=asked.resume)
    policy, tokenizer = load_policy(asked.model, asked.train), load_tokenizer(asked.model)
    optimizer = optimizer_of(policy, asked.lr)
    run.restore(policy, optimizer)
    if asked.start == "none":
        asked.drafter = untrained(asked.model, asked.out / "untrained")
    kept = KeptDrafters(run, asked.drafter, asked.keep_every)
    with ExitStack() as stack:
        url = asked.url or started(stack, asked, kept.newest())
        client = stack.enter_context(Client(url))
        set_speculation(client, asked.speculation, asked.strategy)
        pushes = (PaddedPushes if asked.padded else Pushes)(run, asked, client)
        if (asked.url or asked.padded) and asked.speculation != "off":
            kept.push(pushes, kept.newest())
        drafter = ADAPTATIONS[asked.speculation](run, asked, kept, client, pushes)
        if not run.steps:
            run.keep_weights(policy, asked.model)
        while run.steps < asked.steps:
            version = f"{asked.out.name}-{run.steps}"
            pushes.taken()
            push_s = pushes.target(policy, version)
            marks = [time.perf_counter()]
            drafted_with = client.weights()["drafter"]
            drafter.drafts(drafted_with)
            prompts = draw_prompts(tokenizer, asked.prompts, kinds, asked.seed, run.steps)
            groups = roll_out(client, prompts, asked.group, asked.max_tokens, version)
            marks.append(time.perf_counter())
            run.keep_responses(groups, version, asked.model, asked.max_tokens)
            done = update(
                policy, optimizer, groups, asked.minibatches, asked.clip, asked.correction
            )
            marks.append(time.perf_counter())
            trained = drafter.adapt(policy)
            line = {
                "step": run.steps,
                "version": version,
                "drafter_version": drafted_with,
                "speculation": asked.speculation,
                "push_s": round(push_s, 4),
                **dict(zip(("rollout_s", "policy_s"), seconds(marks), strict=True)),
                **dict(zip(("drafter_s", "drafter_push_s"), trained, strict=True)),
                "padding_s": round(pushes.taken(), 4),
                **figures(groups, done),
                **drafter.figures(),
            }
            run.save(policy, optimizer, line)
            if run.steps % asked.keep_every == 0 or run.steps == asked.steps:
                run.keep_weights(policy, asked.model)
            print(said(line, asked.steps), flush=True)


def _checked_kinds(asked: argparse.Namespace) -> list[str]:
    """Return the kinds of exercises; `ValueError` names what cannot be asked for."""
    kinds: list[str] = asked.kinds.split(",")
    if not set(kinds) <= {*KINDS}:
        raise ValueError(f"kinds are {asked.kinds}; there are {', '.join(KINDS)}")
    if asked.padded and asked.speculation == "spot":
        raise ValueError(
            "a server trains the drafter that it has, and here its padding, too; with --padded "
            "use --speculation adaptive"
        )
    return kinds


def load_policy(model: Path, trained: str) -> Qwen2ForCausalLM:
    """Return the model in float32; `trained` says which weights get gradients: all or norms."""
    policy = Qwen2ForCausalLM.from_pretrained(model, dtype=torch.float32)
    for name, parameter in policy.named_parameters():
        parameter.requires_grad_(trained == "all" or "norm" in name)
    return policy


def started(stack: ExitStack, asked: argparse.Namespace, drafter: Path) -> str:
    """Start a server and return its address. Its kept pushes end with the run, which pushes its
    weights again when it continues; padded ones are not kept.
    """
    pair, flags = (asked.model, drafter), ["--weight-channels", Pushes.channel]
    if asked.padded:
        pair = asked.padded / "target", asked.padded / "drafter"
        flags = ["--weight-channels", PaddedPushes.channel, "--memory-fraction", PADDED_FRACTION]
    else:
        flags += ["--state-dir", stack.enter_context(TemporaryDirectory(prefix="grpo-"))]
    flags += ["--model", str(pair[0]), "--drafter", str(pair[1])]
    if asked.quantization != "auto":
        flags += ["--quantization", asked.quantization]
    if asked.speculation == "spot":
        flags += ["--drafter-training", "idle", "--drafter-feature-mb", str(FEATURE_MB)]
    return stack.enter_context(ServerProcess(*flags, "--log-level", "warning")).url


def set_speculation(client: Client, speculation: str, strategy: str | None) -> None:
    if speculation == "off":
        client.set_strategy("off")
    elif strategy:
        client.set_strategy("fixed", strategy)
    else:
        client.set_strategy("goodput")


def seconds(marks: Sequence[float]) -> list[float]:
    return [round(b - a, 4) for a, b in zip(marks[:-1], marks[1:], strict=True)]


def figures(groups: Sequence[Group], done: Update) -> dict[str, Any]:
    """Return the figures of a step's responses and its update, for its line."""
    choices = [choice for group in groups for choice in group.choices]
    lengths = [len(choice.token_ids) for choice in choices]
    deciles = quantiles(lengths, n=100, method="inclusive")
    by_kind: dict[str, list[float]] = {}
    for group in groups:
        by_kind.setdefault(group.prompt.exercise.kind, []).extend(group.rewards)
    accepted = accept_length(choices)
    return {
        "reward": round(fmean(r for group in groups for r in group.rewards), 6),
        "reward_by_kind": {k: round(fmean(r), 4) for k, r in sorted(by_kind.items())},
        "entropy": round(done.entropy / done.tokens, 6),
        "tokens": sum(lengths),
        "length": {f"p{n}": deciles[n - 1] for n in (50, 90, 99)} | {"max": max(lengths)},
        "truncated": sum(choice.finish_reason == "length" for choice in choices),
        "accept_length": None if accepted is None else round(accepted, 4),
        "accepted_at_depth": [round(share, 4) for share in acceptance_by_depth(choices)],
        "loss": done.loss,
        "gradient_norms": done.norms,
        "clipped": done.clipped,
        "logprob_difference": done.difference,
        "mean_logprob_difference": done.differences / done.compared,
        "divergence": done.divergence / done.compared,
    }


def said(line: dict[str, Any], steps: int) -> str:
    accepted = f"{line['accept_length']:.2f}" if line["accept_length"] else "off"
    return (
        f"step {line['step'] + 1} of {steps}: reward {line['reward']:.3f}, entropy "
        f"{line['entropy']:.3f}, {line['tokens']} tokens, accept length {accepted}; rollout "
        f"{line['rollout_s']:.1f} s, push {line['push_s']:.2f} s, policy {line['policy_s']:.1f} s, "
        f"drafter {line['drafter_s']:.1f} s"
    )


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the server is stopped, too
    train(arguments().parse_args())
