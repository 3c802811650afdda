"""Compare GRPO runs against servers with and without FP8, with and without a corrected loss.

    python -m examples.grpo.corrections --steps 20 --threads 2 --out build/corrections

All runs have the options of `examples.grpo.train`, begin with the same policy and draw the same
problems, by seed. An FP8 server samples from another distribution than the policy that is updated:
`divergence` is the mean of its log-prob minus the policy's over the tokens that it sampled, which
estimates the KL divergence in nats per token.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from examples.grpo.compare import lines_of
from examples.grpo.train import arguments, train
from tlt_server.bench.record import entry_of, without_folder, write_entry


class Kind(NamedTuple):
    """A server's weights and the correction in the loss."""

    quantization: str
    correction: str


KINDS = (Kind("none", "ratio"), Kind("fp8", "none"), Kind("fp8", "truncated"), Kind("fp8", "ratio"))


def made(asked: argparse.Namespace, kind: Kind, seed: int) -> list[dict[str, Any]]:
    """Run the steps, or go on with them, and return their lines."""
    own = argparse.Namespace(**{**vars(asked), **kind._asdict(), "resume": True, "seed": seed})
    own.out = asked.out / f"{kind.quantization}-{kind.correction}-{seed}"
    print(f"into {own.out}", flush=True)
    train(own)
    return lines_of(own.out)


def row(kind: Kind, runs: Sequence[Sequence[dict[str, Any]]]) -> dict[str, Any]:
    """Return the figures of one kind of run; `runs` has one for each seed."""
    lines = [line for run in runs for line in run]
    later = [fmean(line["reward"] for line in run[len(run) // 2 :]) for run in runs]
    tokens = sum(line["tokens"] for line in lines)
    return {
        **kind._asdict(),
        "runs": len(runs),
        "steps": len(runs[0]),
        "reward": round(fmean(line["reward"] for line in lines), 4),
        "later_reward": round(fmean(later), 4),
        "spread": round(stdev(later), 4) if len(later) > 1 else None,
        "mean_difference": round(fmean(line["mean_logprob_difference"] for line in lines), 6),
        "largest_difference": round(max(line["logprob_difference"] for line in lines), 4),
        "divergence": round(fmean(line["divergence"] for line in lines), 8),
        "clipped": round(sum(line["clipped"] for line in lines) / tokens, 6),
    }


def main(flags: Sequence[str]) -> None:
    parser = arguments()
    parser.prog, parser.description = "python -m examples.grpo.corrections", __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--seeds", type=int, default=2, help="runs of each kind")
    parser.add_argument("--json", type=Path, help="also write a file like those of tlt bench")
    parser.add_argument("--commit", help="of the code that runs [default: what git says]")
    asked = parser.parse_args(flags)
    rows = [row(kind, [made(asked, kind, seed) for seed in range(asked.seeds)]) for kind in KINDS]
    for each in rows:
        print("  ".join(f"{name} {value}" for name, value in each.items()))
    if asked.json:
        figures = {
            "bench": "corrections",
            "prompts": asked.prompts,
            "group": asked.group,
            "lr": asked.lr,
            "rows": rows,
        }
        words = ["python", "-m", "examples.grpo.corrections", *map(without_folder, flags)]
        write_entry(
            asked.json, entry_of(figures, shlex.join(words), on_gpu=False, commit=asked.commit)
        )


if __name__ == "__main__":
    main(sys.argv[1:])
