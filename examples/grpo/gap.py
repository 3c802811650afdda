"""Compare a run's drafters with an oracle: the share of the gap between frozen and oracle that the
adaptive drafter has recovered.

    python -m examples.grpo.gap build/grpo/adaptive --from-step 50

The oracle starts as the run's first drafter and is trained offline on the last policy's states, on
all steps that are not replayed. Steps whose weights were kept are replayed; a replay is exact.
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
        prog="python -m examples.grpo.gap", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="directory of a run")
    parser.add_argument("--from-step", type=int, default=0, help="first step that is replayed")
    parser.add_argument(
        "--strategy", default="eagle:7x1x8", help="what all drafters draft [default eagle:7x1x8]"
    )
    parser.add_argument(
        "--oracle", type=Path, help="a drafter [default: RUN/oracle, trained where it is missing]"
    )
    parser.add_argument(
        "--oracle-steps", type=int, default=1000, help="training steps of the oracle"
    )
    parser.add_argument("--oracle-lr", type=float, default=5e-4, help="their learning rate")
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        help="where it trains and replays [default: cuda if the kernels run on one]",
    )
    parser.add_argument("--threads", type=int, default=1)
    return parser


if __name__ == "__main__":
    os.environ.update(library_environment())  # read by torch when it is imported
    sys.exit(import_module("examples.grpo.oracle").compare(arguments().parse_args()))
