"""Weaken a trained drafter: move its weights part of the way to an earlier one's, so that it
accepts as little as drafters of large models do.

w = earlier + keep * (trained - earlier). Rows of the LM head whose ids the earlier drafter lacks
stay as they are. `tlt drafter evaluate` tells what the result accepts.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
from card import record_figures
from safetensors.torch import load_file, save_file

WEIGHTS = "model.safetensors"


def weakened(
    trained: dict[str, torch.Tensor], earlier: dict[str, torch.Tensor], keep: float
) -> dict[str, torch.Tensor]:
    new_C, old_C = (x["d2t"] + torch.arange(len(x["d2t"])) for x in (trained, earlier))
    head = trained["lm_head.weight"].clone()
    known_C = torch.isin(new_C, old_C)
    head[known_C] = earlier["lm_head.weight"][torch.searchsorted(old_C, new_C[known_C])]
    earlier = {**earlier, "lm_head.weight": head}
    return {
        name: (old + keep * (value.float() - old)).to(value.dtype)
        if value.is_floating_point()
        else value
        for name, value in trained.items()
        for old in [earlier[name].float()]
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pair", type=Path, required=True, help="the pair of the trained drafter")
    parser.add_argument("--earlier", type=Path, default=Path("tlt_server/demo/pair"))
    parser.add_argument("--keep", type=float, required=True, help="0: the earlier; 1: all")
    parser.add_argument("--out", type=Path, required=True, help="where to write the drafter")
    options = parser.parse_args()
    trained, earlier = (
        load_file(pair / "drafter" / WEIGHTS) for pair in (options.pair, options.earlier)
    )
    options.out.mkdir(parents=True)
    shutil.copyfile(options.pair / "drafter" / "config.json", options.out / "config.json")
    save_file(
        weakened(trained, earlier, options.keep), options.out / WEIGHTS, metadata={"format": "pt"}
    )
    figures = {"keep": options.keep}
    record_figures(options.out.parent / "figures.json", "drafter_weakening", figures)


if __name__ == "__main__":
    main()
