"""Make a drafter for another text: the shipped one, trained on over one kind of problem alone until
it has forgotten much of the others.

    python -m examples.grpo.foreign --out build/foreign

The drafter is in `drafter/` below `--out`. The last lines compare it with the shipped one on all
kinds, by replay. One seed and number of threads give the same drafter on the same processor.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from examples.grpo.record import RunDirectory
from examples.grpo.rollouts import KINDS, draw_prompts, load_tokenizer, roll_out
from examples.grpo.train import started
from tlt_client import Client
from tlt_server.demo.workload import DRAFTER, TARGET

MAX_TOKENS = 400
GROUP = 2


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m examples.grpo.foreign", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--out", type=Path, required=True, help="a new directory")
    parser.add_argument("--kind", choices=KINDS, default="column", help="what it is trained on")
    parser.add_argument("--prompts", type=int, default=256, help="prompts of that kind")
    parser.add_argument("--steps", type=int, default=60, help="training steps")
    parser.add_argument("--lr", type=float, default=2.5e-3, help="their learning rate")
    parser.add_argument("--budget", type=int, default=1024, help="tokens of a step")
    parser.add_argument("--judged", type=int, default=48, help="prompts that compare the drafters")
    parser.add_argument("--seed", type=int, default=7)
    return parser


def record(asked: argparse.Namespace, trained_on: Sequence[str]) -> tuple[Path, Path]:
    """Roll out `asked.prompts` prompts of some kinds to train on, and `asked.judged` of all kinds;
    return a segment of each.
    """
    asked.model, asked.padded, asked.speculation = TARGET, None, "frozen"
    options = {"kinds": list(trained_on), "seed": asked.seed}
    run, tokenizer = RunDirectory(asked.out, options, resume=False), load_tokenizer(TARGET)
    with ExitStack() as stack:
        client = stack.enter_context(Client(started(stack, asked, DRAFTER)))
        version = client.weights()["target"]
        for kinds, count in ((trained_on, asked.prompts), (KINDS, asked.judged)):
            prompts = draw_prompts(tokenizer, count, kinds, asked.seed, run.steps)
            groups = roll_out(client, prompts, GROUP, MAX_TOKENS, version)
            run.keep_responses(groups, version, TARGET, MAX_TOKENS)
            run.steps += 1
    first, second = sorted((asked.out / "responses").glob("*.segment"))
    return first, second


def make(asked: argparse.Namespace) -> None:
    trained_on, judged_on = record(asked, (asked.kind,))
    drafter = asked.out / "drafter"
    command = ["train", "--drafter", DRAFTER, "--data", trained_on, "--out", drafter]
    command += ["--acceptance", "total-variation", "--device", "cpu", "--seed", asked.seed]
    command += ["--steps", asked.steps, "--lr", asked.lr, "--budget", asked.budget]
    tlt_drafter(*command)
    chain = ("--width", 1, "--rows", 8)
    tlt_drafter(
        "evaluate", "--record", judged_on, "--drafter", DRAFTER, "--drafter", drafter, *chain
    )


def tlt_drafter(verb: str, *flags: object, target: Path = TARGET) -> None:
    """Run a verb of `tlt drafter`. `CalledProcessError`: it failed."""
    command = [sys.executable, "-m", "tlt_server", "drafter", verb, "--target", str(target)]
    subprocess.run([*command, *map(str, flags)], check=True)


if __name__ == "__main__":
    make(arguments().parse_args())
