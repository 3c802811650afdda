"""The five figures of README's first screen, made of the results that answer the goals."""

from __future__ import annotations

import re
from collections.abc import Sequence

from benchmarks.goals import Result, answer, comparable, goals

BULLETS = re.compile(r"(?:^- \*\*.*\n)+", re.MULTILINE)


def bullets(found: Sequence[Result]) -> str:
    wanted = goals()
    usable = comparable(found, wanted)

    def value(what: str) -> float:
        goal = next(goal for goal in wanted["goals"] if goal["what"] == what)
        answered = answer(goal, usable)
        assert answered, f"{what} is not measured"
        return answered.value

    floor = next(v for v in wanted["others"]["step_ms"] if "floor" in v["engine"])["values"][0]
    exact = [r for r in usable if r.bench == "exact" and r.figures["numerics"] == "strict"][-1]
    cycles = [r for r in usable if r.bench == "cycle"][-1].figures["rows"]
    fastest = max(
        (row for row in cycles if row["prompt"] == "problem"), key=lambda row: row["tokens_per_s"]
    )
    pushed = [r for r in usable if r.bench == "weights-gpu"][-1].figures["rows"][0]["bytes"]
    return (
        f"- **{value('plain decode, batch 1'):.2f} ms** per plain step at batch 1, where reading "
        f"the weights once takes {floor} ms.\n"
        f"- **{fastest['tokens_per_s']:,.0f} tokens/s** for one request with speculation (the "
        f"shipped pair in 7B shapes, accept length {fastest['accept_length']:.1f} on its own, easy "
        "task).\n"
        f"- **{exact.figures['differing_tokens']} of {exact.figures['tokens']:,} tokens** and "
        f"{exact.figures['differing_logprob_bits']} of their log-probs differ, to the bit, over "
        f"{exact.figures['configurations']} combinations of strategy, batch, memory and chunking.\n"
        f"- **{value('price of strict, decode, batch 1-64'):.1f} %** is the price of that "
        f"exactness at batches 1 to 64, {value('price of strict, decode, batch 256'):.1f} % at "
        "batch 256.\n"
        f"- **{value('gap between tokens at the commit of pushed weights, ipc'):.0f} ms** between "
        f"two tokens while {pushed / 1e9:.1f} GB of pushed weights go live.\n"
    )


def with_figures(readme: str, found: Sequence[Result]) -> str:
    """Return README with its bold bullets, which stand on the first screen only, made new."""
    return BULLETS.sub(lambda _: bullets(found), readme, count=1)
