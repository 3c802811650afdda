"""The page's first two sections: the goals, and other engines' figures alongside ours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.goals import Result, answer, comparable, goals, matches, verdict
from benchmarks.markdown import RESULTS_FOLDER, lines
from tlt_server.bench.tables import number


def goals_section(found: Sequence[Result]) -> Iterator[str]:
    wanted = goals()
    yield f"## Figures to reach\n\nSetting: {wanted['setting']}."
    answers = [(goal, answer(goal, suited(goal, found, wanted))) for goal in wanted["goals"]]
    rows = []
    for goal, answered in answers:
        ours = ["", "not measured"]
        if answered:
            value = f"{answered.value:.3f}" if goal["unit"] == "x" else number(answered.value)
            ours = [f"[{value}]({RESULTS_FOLDER}/{answered.name})", verdict(goal, answered.value)]
        wanted_figures = f"{goal['must']} / {goal['stretch']}"
        rows.append([f"{goal['what']}, {goal['unit']}", wanted_figures, *ours])
    yield lines(("what", "must / stretch", "measured", ""), rows)
    commits = dict.fromkeys(answered.commit for _, answered in answers if answered)
    if len(commits) > 1:
        yield (
            f"Several commits ({', '.join(commits)}): what is exact at one of them need not be "
            "the code that is fast at another."
        )


def suited(
    goal: Mapping[str, Any], found: Sequence[Result], wanted: Mapping[str, Any]
) -> list[Result]:
    """Return the results of the goal's own machine, shape and kind of engine, if it names them; a
    goal for any machine names an empty one, and no shape.
    """
    own = {name: goal[name] for name in ("machine", "shape") if name in goal}
    return comparable(found, {**wanted, **own}, goal.get("engine"))


class Ours(NamedTuple):
    """Our line in the comparison: milliseconds per step or cycle by batch."""

    line: Mapping[str, Any]  # from goals.json
    step_ms: dict[int, float]
    file: str


def ours(found: Sequence[Result]) -> Iterator[Ours]:
    """Yield each line of ours from the newest result that has it."""
    wanted = goals()
    usable = comparable(found, wanted)[::-1]
    for line in wanted["others"]["ours"]:
        for result in usable:
            step_ms = {
                row["batch"]: row["step_ms"]
                for row in result.figures.get("rows", ())
                if result.bench == line["bench"] and matches(row, line["where"])
            }
            if step_ms:
                yield Ours(line, step_ms, result.name)
                break


def others_section(found: Sequence[Result]) -> Iterator[str]:
    others = goals()["others"]
    batches = [int(column) for column in others["columns"]]
    length = others["accept_length"]
    yield (
        "## Other engines\n\n"
        f"Milliseconds per step or cycle by batch. Other engines: {others['where']}. "
        "Ours: the shipped pair in those shapes, from the engine's loop, without text and HTTP."
    )
    rows: list[list[object]] = [
        [line["engine"], *("" if v is None else f"{v:.2f}" for v in line["values"])]
        for line in others["step_ms"]
    ]
    rates: list[list[object]] = [
        [line["engine"], *line["values"]] for line in others["tokens_per_s"]
    ]
    columns = batches[: len(rates[0]) - 1]
    for line, step_ms, file in ours(found):
        times = [f"{step_ms[b]:.2f}" if b in step_ms else "" for b in batches]
        rows.append([f"[{line['engine']}]({RESULTS_FOLDER}/{file})", *times])
        if "rated" in line:
            rates.append(
                [
                    line["rated"],
                    *(
                        round(b * length / step_ms[b] * 1e3) if b in step_ms else ""
                        for b in columns
                    ),
                ]
            )
    yield lines(("engine", *(f"batch {batch}" for batch in batches)), rows)
    yield (
        f"Tokens per second if the accept length were {length} "
        f"(ours: batch x {length} / time of a cycle):"
    )
    yield lines(("engine", *(f"batch {batch}" for batch in columns)), rates)
