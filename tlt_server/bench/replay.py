"""`tlt bench replay`: policies on a recorded rollout, without a model: seconds, tokens per second,
switches, and regret against the best choice of every step in hindsight.

Tokens and accepted drafts are those of the record, seconds those of a cost model fitted to its
cycles, so a replay takes seconds and needs no GPU.

    tlt bench replay /tmp/rollout.safetensors --policy goodput --policy fixed:eagle:7x1x8
    tlt bench replay gpu.safetensors --rounds 2 --plots plots --json replay.json
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from typing import Any

from tlt_server.bench.record import finish, progress_bar, wide_console
from tlt_server.bench.replaying.drafts import check_strategy
from tlt_server.bench.replaying.names import policy_name
from tlt_server.bench.replaying.plots import check_plots, draw
from tlt_server.bench.replaying.simulated import Replay, ReplayResult
from tlt_server.bench.tables import REPLAY, show
from tlt_server.speculation.recorded import RolloutRecord
from tlt_server.wire.commands import SetPolicy

ORACLE = "best in hindsight"
DEFAULT = ("off", "goodput", "beg")


def run(args: argparse.Namespace) -> int:
    """Print a table and one line of JSON."""
    if args.plots:
        check_plots()
    record = RolloutRecord.load(args.file)
    commands = args.policy or [SetPolicy(name) for name in DEFAULT]
    for strategy in filter(None, (command.strategy for command in commands)):
        check_strategy(record.header, strategy)
    named: dict[str, SetPolicy | None] = {policy_name(c): c for c in commands}
    named[ORACLE] = None
    tokens = int(record.responses.output_len_N.sum())
    console = wide_console()
    found: dict[str, ReplayResult] = {}
    with progress_bar(console) as progress:
        task = progress.add_task("replay", total=tokens * len(named) * args.rounds)
        for name, command in named.items():
            progress.update(task, description=name.replace(":", " "))
            knowledge = None
            for turn in range(args.rounds):
                last = turn == args.rounds - 1
                replay = Replay(record, command, judged=last, knowledge=knowledge)
                steps = _every(lambda n: progress.update(task, advance=n))
                found[name] = replay.run(steps)
                knowledge = found[name].knowledge
    rows = {name: figures(replayed) for name, replayed in found.items()}
    for recorded in record.header.runs:
        if recorded.policy in rows:
            rows[recorded.policy]["recorded_s"] = round(recorded.seconds, 4)
    named_rows = [
        {"policy": name, "requests": len(record.responses), **row} for name, row in rows.items()
    ]
    show(console, "tlt bench replay", REPLAY, named_rows)
    if args.plots:
        for file in draw(found, args.plots):
            console.print(f"{file} written", highlight=False)
    summary = {
        "bench": "replay",
        "rounds": args.rounds,
        "requests": len(record.responses),
        "tokens": tokens,
        **record.header.described,
        "rows": named_rows,
    }
    finish(args, summary, on_gpu=False, recorded_on=record.header.machine)
    return 0


def figures(replayed: ReplayResult) -> dict[str, Any]:
    cycles = [c.cycle for c in replayed.cycles]
    by_strategy: dict[str, float] = defaultdict(float)
    for cycle in cycles:
        by_strategy[cycle.strategy.shape] += cycle.step_s
    decoding = sum(len(c.accepted) for c in cycles if c.drafted)
    changes = sum(
        a.strategy.shape != b.strategy.shape for a, b in zip(cycles, cycles[1:], strict=False)
    )
    seconds = replayed.seconds
    return {
        "seconds": round(seconds, 4),
        "tokens_per_s": round(replayed.tokens / seconds, 1),
        "cycles": len(cycles),
        "switches": changes,
        "accept_length": round(
            1 + sum(sum(c.accepted) for c in cycles if c.drafted) / max(1, decoding), 3
        ),
        "regret": round(regret_s(replayed) / seconds, 5),
        "expected_regret": round(expected_regret_s(replayed) / seconds, 5),
        "calibration_error": {
            name: round(abs(known.ratio - 1), 5)
            for name, known in replayed.knowledge.estimates.items()
        },
        "share_of_time": {
            name: round(part / seconds, 4)
            for name, part in sorted(by_strategy.items(), key=lambda item: -item[1])
        },
    }


def regret_s(replayed: ReplayResult) -> float:
    """Return the seconds lost against the best choice of every step; see `hindsight`."""
    lost = 0.0
    for cycle, best, *_ in replayed.cycles:
        if best is not None and cycle.emitted:
            lost += max(0.0, cycle.step_s - cycle.emitted / best.rate)
    return lost


def expected_regret_s(replayed: ReplayResult) -> float:
    """Return the same with expected tokens: every choice yields the sum of its acceptance
    probabilities.
    """
    return sum(
        max(0.0, each.cycle.step_s - each.expected / each.best.expected_rate)
        for each in replayed.cycles
        if each.best is not None and each.cycle.emitted
    )


def _every(advance: Any, tokens: int = 512) -> Any:
    """Return a function that adds up its arguments and passes on `tokens` at a time."""
    waiting = 0

    def add(count: int) -> None:
        nonlocal waiting
        waiting += count
        if waiting >= tokens:
            advance(waiting)
            waiting = 0

    return add
