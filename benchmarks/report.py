"""`python -m benchmarks.report`: write docs/performance.md, the table of docs/fp8.md and the first
figures of the README, from the goals and the files of benchmarks/results.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from benchmarks.comparison import goals_section, others_section, suited
from benchmarks.goals import Found, Result, answer, comparable, goals, results
from benchmarks.markdown import RESULTS_FOLDER, lines, link
from benchmarks.sections.table import SECTIONS

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE, README = ROOT / "docs" / "performance.md", ROOT / "README.md"
FP8_PAGE, IN_FP8 = ROOT / "docs" / "fp8.md", "FP8: "  # page; first word of its goals

INTRODUCTION = """\
# Performance

`python -m benchmarks.report` generates this page from [benchmarks/results](../benchmarks/results):
do not edit it. Each file there holds the figures of one run with command, commit, date, machine and
all versions. Times of steps are medians as the host sees them, from the end of one step to the end
of the next, after the first steps of a batch. What was tried is in the
[notes on performance](performance_notes.md).

`make bench-gpu PAIR=DIR` runs the GPU benches, `make test-gpu` the GPU tests, with `GPUS=2` those
over two; `tlt bench NAME --help` describes one bench. `--json FILE` writes a file like those
below. A padded pair (`tlt bench pad`) has a large model's shapes and costs, but says what the
shipped pair says, so acceptance is that of a trained drafter on its own, easy task."""

FIGURES = re.compile(r"(?<=<!--figures-->\n).*?(?=<!--/figures-->)", re.DOTALL)
BULLETS = re.compile(r"(?:^- \*\*.*\n)+", re.MULTILINE)
NAMED_VERSIONS = ("torch", "triton", "cuda", "driver")  # the result's file has all


def page(found: Sequence[Result]) -> str:
    machines = {
        name: f"M{place}" for place, name in enumerate(dict.fromkeys(map(_machine, found)), 1)
    }
    parts = [INTRODUCTION, *goals_section(found), *others_section(found)]
    for bench, (title, section) in SECTIONS.items():
        runs = [result for result in found if result.bench == bench]
        if runs and f"## {title}" not in parts:  # some benches share a section
            parts.append(f"## {title}")
        explained: set[str] = set()  # a section explains its tables once
        for result in runs:
            paragraphs = [part for part in section(result.figures) if part not in explained]
            explained.update(part for part in paragraphs if not part.startswith("|"))
            parts += [_source(result, machines[_machine(result)]), *paragraphs]
    parts.append("## Machines")
    parts.append("\n".join(f"- {short}: {name}." for name, short in machines.items()))
    return "\n\n".join(parts) + "\n"


def _source(result: Result, machine: str) -> str:
    entry = result.entry
    note = f" {entry['note']}" if "note" in entry else ""
    quick = " A quick run." if result.figures.get("quick") else ""
    command = re.sub(r" --(commit|json) \S+", "", entry["command"])  # both stand next to it
    return (
        f"{link(result.name)}: `{command}` at {entry['commit']}, "
        f"[{machine}](#machines).{quick}{note}"
    )


def _machine(result: Result) -> str:
    versions = ", ".join(
        f"{name} {version}"
        for name, version in result.entry["versions"].items()
        if name in NAMED_VERSIONS
    )
    return f"{result.entry['machine']}; {versions}"


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
        + (
            f"- **{fp8.value:.2f} ms** per plain step at batch 1 with [FP8 weights](docs/fp8.md), "
            "with the same promises.\n"
            if (fp8 := measured(f"{IN_FP8}plain decode, batch 1", found))
            else ""
        )
    )


def measured(what: str, found: Sequence[Result]) -> Found | None:
    """Return the figure of a goal, if there is such a goal and one."""
    wanted = goals()
    chosen = [goal for goal in wanted["goals"] if goal["what"] == what]
    return answer(chosen[0], suited(chosen[0], found, wanted)) if chosen else None


def with_table(page: str, found: Sequence[Result]) -> str:
    """Return the page about FP8 with figures of both kinds of weights, where both are measured."""
    rows = []
    for goal in goals()["goals"]:
        pair = [measured(what, found) for what in (goal["what"].removeprefix(IN_FP8), goal["what"])]
        if goal["what"].startswith(IN_FP8) and all(pair):
            links = [f"[{each.value:,.5g}]({RESULTS_FOLDER}/{each.name})" for each in pair if each]
            rows.append([f"{goal['what'].removeprefix(IN_FP8)}, {goal['unit']}", *links])
    text = lines(("", "bfloat16", "FP8"), rows) if rows else "Not measured yet."
    return FIGURES.sub(lambda _: f"\n{text}\n\n", page)


def with_figures(readme: str, found: Sequence[Result]) -> str:
    """Return the README with updated bold bullets, which are only on its first screen."""
    return BULLETS.sub(lambda _: bullets(found), readme, count=1)


def main() -> None:
    found = results(RESULTS)
    PAGE.write_text(page(found))
    README.write_text(with_figures(README.read_text(), found))
    FP8_PAGE.write_text(with_table(FP8_PAGE.read_text(), found))
    print(f"{PAGE.relative_to(ROOT)}, the figures of {README.name} and {FP8_PAGE.name} written")


if __name__ == "__main__":
    main()
