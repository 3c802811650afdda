"""Compare the objectives that a drafter can be trained by, on the demo pair.

    python -m examples.grpo.objectives --out build/objectives

Each drafter starts from the same weights, is trained on the same packs of one record of responses,
and is replayed on prompts that are not in it. The table is also in `objectives.json`.
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module
from pathlib import Path

from tlt_server.models.environment import library_environment


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m examples.grpo.objectives", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--out", type=Path, required=True, help="directory; its record is kept")
    parser.add_argument("--drafter", type=Path, help="start [default: one never trained]")
    parser.add_argument(
        "--prompts", type=int, default=512, help="prompts to train on, two responses each"
    )
    parser.add_argument("--judged", type=int, default=64, help="further prompts, for the replay")
    parser.add_argument(
        "--tokens", type=int, default=8_000_000, help="tokens each drafter is trained on, in epochs"
    )
    parser.add_argument("--budget", type=int, default=8192, help="tokens of a step")
    parser.add_argument("--lr", type=float, help="learning rate [default as tlt drafter train]")
    parser.add_argument(
        "--acceptance",
        nargs="+",
        default=["total-variation"],
        help="terms added to each objective: none, total-variation, shared-noise",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where it trains")
    parser.add_argument("--threads", type=int, default=1, help="of the CPU")
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--json", type=Path, help="also write a file like those of tlt bench")
    parser.add_argument("--commit", help="of the code that runs [default: what git says]")
    return parser


if __name__ == "__main__":
    os.environ.update(library_environment())  # read by torch when it is imported
    sys.exit(import_module("examples.grpo.side_by_side").compare(arguments().parse_args()))
