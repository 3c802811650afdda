"""The demo's final output: one row per round, a sample, and the figures as JSON."""

from __future__ import annotations

import math
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from tlt_server.demo.rounds import RoundOutcome
from tlt_server.demo.task import Exercise

SAMPLE_LINES = 14
PERCENTILES = (50, 90, 99)
HEADINGS = (
    "round",
    "wall s",
    "passes",
    "tokens\n/s",
    "speed-\nup",
    "accept\nlength",
    "tokens\nidentical",
    "reward",
    "response length\np50/p90/p99/max",
)  # the table fits into 80 columns


def percentile(values: list[int], percent: int) -> int:
    """Return the nearest-rank percentile of sorted values."""
    return values[max(0, math.ceil(len(values) * percent / 100) - 1)]


def rounds_table(outcomes: list[RoundOutcome]) -> Table:
    reference = outcomes[0]
    fixed = "; ".join(
        f"{o.round.name} is {o.round.strategy} throughout" for o in outcomes if o.round.strategy
    )
    table = Table(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=0,
        caption_justify="left",
        caption=fixed,
        title=(
            f"{len(reference.lengths)} responses over HTTP, the same seeds in every round; "
            "each round starts\nwith no prefix, no text and no policy of an earlier one"
        ),
    )
    for heading in HEADINGS:
        table.add_column(
            heading, justify="left" if heading == HEADINGS[0] else "right", no_wrap=True
        )
    for outcome in outcomes:
        same, lengths = not outcome.differing(reference), outcome.lengths
        table.add_row(
            outcome.round.name,
            f"{outcome.seconds:.1f}",
            str(outcome.passes),
            f"{outcome.tokens / outcome.seconds:.0f}",
            f"{reference.seconds / outcome.seconds:.2f}x",
            f"{outcome.accept_length:.2f}" if outcome.accept_length else "-",
            "yes" if same else "NO",
            f"{sum(outcome.rewards) / len(outcome.rewards):.3f}",
            "/".join(
                str(value)
                for value in (*(percentile(lengths, p) for p in PERCENTILES), lengths[-1])
            ),
            style="" if same else "bold red",
        )
    return table


def print_sample(console: Console, problems: list[Exercise], outcome: RoundOutcome) -> None:
    """Print the shortest rewarded response with at least a few lines, else the first response."""
    texts = [
        (task, choice.text or "")
        for task, group in zip(problems, outcome.choices, strict=True)
        for choice in group
    ]
    good = [
        (task, text)
        for (task, text), reward in zip(texts, outcome.rewards, strict=True)
        if reward and text.count("\n") >= 3
    ]
    task, text = min(good, key=lambda pair: len(pair[1])) if good else texts[0]
    lines = text.splitlines()
    shown = lines if len(lines) <= SAMPLE_LINES else [*lines[: SAMPLE_LINES - 2], "...", lines[-1]]
    console.print("One of them:", style="bold")
    console.print(
        "\n".join(f"  {line}" for line in (task.prompt_text, "", *shown)),
        markup=False,
        highlight=False,
    )


def figures(outcomes: list[RoundOutcome]) -> dict[str, Any]:
    reference = outcomes[0]
    return {
        "responses": len(reference.lengths),
        "tokens": reference.tokens,
        "rounds": [
            {
                "name": o.round.name,
                "policy": o.round.policy,
                "strategy": o.round.strategy,
                "wall_s": round(o.seconds, 3),
                "passes": o.passes,
                "tokens_per_s": round(o.tokens / o.seconds, 1),
                "speedup": round(reference.seconds / o.seconds, 3),
                "accept_length": round(o.accept_length, 3) if o.accept_length else None,
                "responses_differing": o.differing(reference),
                "reward": round(sum(o.rewards) / len(o.rewards), 4),
                "length": {
                    **{f"p{p}": percentile(o.lengths, p) for p in PERCENTILES},
                    "max": o.lengths[-1],
                },
            }
            for o in outcomes
        ],
    }
