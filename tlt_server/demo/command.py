"""`tlt demo`: serve the shipped pair in a process of its own, roll the same batch out under four
policies, compare the tokens.

Everything goes over HTTP, as a trainer's rollout would. Then new weights are pushed while the batch
runs once more (see `push`). Exit status 0 when every round gave the tokens of the first and the
push kept what it promises, else 1.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from tlt_client import Client
from tlt_client.errors import TltClientError
from tlt_server.demo.display import STARTING, Display
from tlt_server.demo.push import VERSION, perturbed_copy, push_figures, push_in_flight, push_lines
from tlt_server.demo.rounds import FULL, QUICK, ROUNDS, RoundOutcome, chosen_problems, play
from tlt_server.demo.server import ServerProcess
from tlt_server.demo.table import figures, print_sample, rounds_table
from tlt_server.demo.workload import DRAFTER, TARGET

PLAIN_WIDTH = 150  # columns, where there is no terminal to ask


def run(args: argparse.Namespace) -> int:
    console = Console() if sys.stdout.isatty() else Console(width=PLAIN_WIDTH)
    size = QUICK if args.quick else FULL
    problems = chosen_problems(size, args.seed)
    model, drafter = str(args.model or TARGET), str(args.drafter or DRAFTER)
    flags = [
        "--model",
        model,
        "--drafter",
        drafter,
        "--log-level",
        "warning",
        *(["--threads", str(args.threads)] if args.threads else []),
    ]
    outcomes: list[RoundOutcome] = []
    try:
        with (
            TemporaryDirectory(prefix="tlt-demo-") as root,
            Display(console, size.problems * size.responses) as display,
        ):
            display.phase(STARTING)
            weights = perturbed_copy(Path(model), Path(root) / VERSION)
            with (
                ServerProcess(*flags, "--weight-root", root, on_line=display.say) as server,
                Client(server.url, timeout_s=600) as client,
            ):
                loaded = client.strategy()["drafters"]
                for turn in ROUNDS:
                    if not turn.needs or turn.needs in loaded:
                        display.begin(turn)
                        outcomes.append(play(client, turn, problems, size, args.seed, display.show))
                        display.end(outcomes[-1])
                display.phase("pushing new weights while a second batch runs")
                push = push_in_flight(
                    client, server.url, weights, problems, size, args.seed, display.say
                )
                display.phase("stopping the server")
    except TltClientError as error:
        print(f"tlt demo: {error}", file=sys.stderr)
        return 1
    console.print()
    print_sample(console, problems, outcomes[0])
    console.print()
    console.print(rounds_table(outcomes))
    console.print()
    for line in push_lines(push):
        console.print(line, markup=False, highlight=False)
    differing = sum(outcome.differing(outcomes[0]) for outcome in outcomes)
    if args.json:
        found = {
            "demo": "quick" if args.quick else "full",
            **figures(outcomes),
            "push": push_figures(push),
        }
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    _say_next(console, model, drafter)
    return 1 if differing or not push.sound else 0


def _say_next(console: Console, model: str, drafter: str) -> None:
    question = '{"role": "user", "content": "Compute 3*4+5."}'
    request = f'{{"requests": [{{"messages": [{question}], "n": 4}}], "stream": true}}'
    console.print("Next, serve it yourself and ask:", style="bold")
    for line in (
        f"tlt serve --model {model} --drafter {drafter}",
        f"curl -sN http://127.0.0.1:8000/generate -d '{request}'",
    ):
        console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)
