"""Weaken a trained drafter: move its weights part of the way to an earlier one's, so that it
accepts as little as drafters of large models do.

w = earlier + keep * (trained - earlier). Rows of the LM head whose ids the earlier drafter lacks
stay as they are. Prints the accept length of chains on samples of the target, as `StopAt` of
`train_drafter.py` estimates it, and with `--out` writes the drafter.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from corpus import Batcher, Sequences
from drafter_model import DrafterModel, export_drafter, load_drafter
from figures import record_figures
from target_model import load_target
from train_drafter import chain_estimate


def earlier_weights(trained: DrafterModel, earlier: DrafterModel) -> dict[str, torch.Tensor]:
    """The earlier drafter's weights in the trained one's draft vocabulary."""
    weights = {name: value.detach().clone() for name, value in earlier.named_parameters()}
    rows = {int(token): row for row, token in enumerate(earlier.kept_ids)}
    head = trained.lm_head.weight.detach().clone()
    for row, token in enumerate(trained.kept_ids.tolist()):
        if token in rows:
            head[row] = weights["lm_head.weight"][rows[token]]
    return weights | {"lm_head.weight": head}


@torch.no_grad()
def weaken(trained: DrafterModel, earlier: DrafterModel, keep: float) -> None:
    old = earlier_weights(trained, earlier)
    for name, value in trained.named_parameters():
        value.copy_(old[name] + keep * (value - old[name]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pair", type=Path, required=True, help="the pair of the trained drafter")
    parser.add_argument("--earlier", type=Path, default=Path("tlt_server/demo/pair"))
    parser.add_argument(
        "--samples", type=Path, required=True, help="responses of the pair's target"
    )
    parser.add_argument(
        "--keep", type=float, nargs="+", required=True, help="0: the earlier; 1: all"
    )
    parser.add_argument("--depth", type=int, default=7)
    parser.add_argument("--out", type=Path, help="where to write the drafter of the last --keep")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    target = load_target(options.pair / "target", options.device)
    batches = list(Batcher(Sequences.load(options.samples), 16_384, options.device).epoch(0))
    for keep in options.keep:
        drafter, earlier = (
            load_drafter(pair / "drafter", target.config, options.device)
            for pair in (options.pair, options.earlier)
        )
        weaken(drafter, earlier, keep)
        length = chain_estimate(drafter, target, batches, options.depth)
        print(f"keep {keep}: a chain of {options.depth} has accept length {length:.3f}", flush=True)
    if options.out:
        export_drafter(drafter, options.out)
        figures = {"keep": keep, "samples": options.samples.name}
        record_figures(options.out.parent / "figures.json", "drafter_weakening", figures)


if __name__ == "__main__":
    main()
