"""Flags of the runs in other engines, and their figures as one line of JSON.

A process measures one setting, as an engine leaves the GPU's memory for certain only when its
process ends. The first rollout runs twice; its first time warms the engine up and is left out.
Responses are sampled at temperature 1 with the engine's own random numbers, so their lengths differ
from ours; compare tokens per second.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

from benchmarks.peers.prompts import Rollouts, read

Generate = Callable[[list[list[int]]], int]  # prompts that run together -> tokens generated

EXAMPLE = """
A pair, its prompts (with this project installed), then one run per setting (with the engine):

    tlt bench pad --shape qwen2.5-7b --out PAIR
    python -m benchmarks.peers.prompts --model PAIR/target prompts.json
    for drafts in 0 2 3 7; do
        python -m benchmarks.peers.{script} --target PAIR/target --drafter PAIR/drafter \\
            --prompts prompts.json --drafts $drafts
    done
"""


def flags(description: str, script: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description,
        epilog=EXAMPLE.format(script=script),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--target", type=Path, required=True, help="directory of the target")
    parser.add_argument("--drafter", type=Path, required=True, help="directory of the drafter")
    parser.add_argument(
        "--prompts", type=Path, required=True, help="file of python -m benchmarks.peers.prompts"
    )
    parser.add_argument(
        "--drafts",
        type=int,
        default=0,
        metavar="K",
        help="EAGLE-3 chain of K drafts; 0: no speculation [default 0]",
    )
    parser.add_argument(
        "--max-running", type=int, default=256, help="requests that run at once [default 256]"
    )
    return parser


def engine_module(name: str) -> ModuleType:
    """Import an engine; `SystemExit` where it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise SystemExit(
            f"{name} cannot be imported here ({error}); run this with the python of an environment "
            f"that has {name}"
        ) from None


def run(
    options: argparse.Namespace, name: str, start: Callable[[ModuleType, Rollouts], Generate]
) -> int:
    """Start the engine, time every rollout and print one line of JSON."""
    rollouts, module = read(options.prompts), engine_module(name)
    generate = start(module, rollouts)
    generate(next(iter(rollouts.prompts.values())))
    runs = []
    for seed, prompts in rollouts.prompts.items():
        started = time.perf_counter()
        tokens = generate(prompts)
        seconds = time.perf_counter() - started
        runs.append({"seed": int(seed), "makespan_s": seconds, "tokens": tokens})
    print(json.dumps({"engine": f"{name} {module.__version__}", **about(options, rollouts, runs)}))
    return 0


def about(
    options: argparse.Namespace, rollouts: Rollouts, runs: Sequence[dict[str, float]]
) -> dict[str, object]:
    """Settings, medians and every run."""
    return {
        "drafts": options.drafts,
        "requests": len(next(iter(rollouts.prompts.values()))),
        "max_tokens": rollouts.max_tokens,
        "max_running": options.max_running,
        "makespan_s": statistics.median(run["makespan_s"] for run in runs),
        "tokens": statistics.median(run["tokens"] for run in runs),
        "tokens_per_s": round(statistics.median(r["tokens"] / r["makespan_s"] for r in runs), 1),
        "runs": runs,
    }
