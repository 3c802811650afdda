"""`python -m benchmarks.peers.prompts --model PAIR/target prompts.json`: write the prompts of
`tlt bench rollout --http` into a file, so that another engine's environment needs none of ours.

Each seed is one rollout: problems of the demo task, eight responses to each.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class Rollouts(NamedTuple):
    """Prompts by seed; the prompts of one seed run together."""

    max_tokens: int
    prompts: dict[str, list[list[int]]]

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(len(prompt) for prompts in self.prompts.values() for prompt in prompts)


def write(model: Path, file: Path, requests: int, seeds: Sequence[int], max_tokens: int) -> None:
    from tlt_server.demo.workload import problems_as_requests

    prompts = {
        str(seed): [
            list(request.token_ids)
            for request in problems_as_requests(model, requests, group=8, seed=seed)
        ]
        for seed in seeds
    }
    file.write_text(json.dumps(Rollouts(max_tokens, prompts)._asdict()) + "\n")


def read(file: Path) -> Rollouts:
    """`SystemExit` where the file cannot be used."""
    try:
        return Rollouts(**json.loads(file.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise SystemExit(
            f"{file} holds no prompts ({error}); write it by python -m benchmarks.peers.prompts"
        ) from None


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("file", type=Path, help="the file to write")
    parser.add_argument(
        "--model", type=Path, required=True, help="the target, whose tokenizer is used"
    )
    parser.add_argument("--requests", type=int, default=512, help="of a rollout [default 512]")
    parser.add_argument(
        "--seeds",
        type=lambda text: [int(seed) for seed in text.split(",")],
        default=[21, 22, 23, 24, 25],
        help="one rollout each [default 21,22,23,24,25]",
    )
    parser.add_argument("--max-tokens", type=int, default=2000, help="of a response [default 2000]")
    options = parser.parse_args(arguments)
    write(options.model, options.file, options.requests, options.seeds, options.max_tokens)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
