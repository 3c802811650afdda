"""The worth of the target's noise to draft trees: accept length at T=1 with children ranked by the
drafter's log-probability plus the noise that the target will sample with, against the same tree
with children ranked by probability alone. Each has a calibration table of its own.

Also for the cycles whose first token is uncertain, which is where noise decides. Prints one line of
JSON.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from corpus import Batcher
from drafter_model import load_drafter
from sample import sample_problems
from target_model import load_target
from tokenizers import Tokenizer
from tree import UNCERTAIN, Settings, Walk, fit_calibration, replay

from tlt_server.demo import task


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pair", type=Path, default=Path("tlt_server/demo/pair"))
    parser.add_argument("--samples", type=int, default=400, help="responses measured")
    parser.add_argument(
        "--calibration-samples", type=int, default=400, help="others, which fit the tables"
    )
    parser.add_argument(
        "--rows", type=int, default=32, help="verified per cycle, the root included"
    )
    parser.add_argument("--depth", type=int, default=7)
    parser.add_argument("--width", type=int, default=8, help="nodes expanded per level")
    parser.add_argument("--cap", type=int, default=task.RESPONSE_TOKEN_CAP)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    target = load_target(options.pair / "target", options.device)
    drafter = load_drafter(options.pair / "drafter", target.config, options.device)
    tokenizer = Tokenizer.from_file(str(options.pair / "target" / "tokenizer.json"))
    count = options.samples + options.calibration_samples
    data, _ = sample_problems(target, tokenizer, list(task.EVAL_SEEDS[:count]), 1.0, options.cap)
    measured = data.select(torch.arange(options.samples))
    held = data.select(torch.arange(options.samples, count))
    found = {}
    for name, noise in (("shared noise", True), ("no noise", False)):
        batches = list(Batcher(held, 16_384, options.device).epoch(0))
        table, _ = fit_calibration(drafter, target, batches, options.depth, noise=noise)
        walk = Walk()
        shape = Settings(options.rows, options.depth, options.width, 1.0, noise)
        for batch in Batcher(measured, 100_000, options.device, buckets=(128, 512, 2816)).epoch(0):
            replay(drafter, target, table, batch, shape, walk)
        found[name] = walk.summary()
    shared, plain = found["shared noise"], found["no noise"]
    gains = {
        name: round(shared[name] / plain[name] - 1, 4)
        for name in ("accept_length", "uncertain_accept_length")
    }
    shape = {"rows": options.rows, "depth": options.depth, "width": options.width}
    print(json.dumps({**shape, "above_nats": UNCERTAIN, **found, "gain": gains}))


if __name__ == "__main__":
    main()
