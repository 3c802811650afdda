"""`python -m benchmarks.plot`: draw docs/images/speed.svg from benchmarks/results and goals.json.

The drawing contains its figures as JSON in its description, so a test notices if they have changed
since it was drawn.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from benchmarks.comparison import ours
from benchmarks.goals import comparable, goals, results
from benchmarks.report import RESULTS, ROOT

PICTURE = ROOT / "docs" / "images" / "speed.svg"
COLOURS = {"vLLM": "#a371f7", "SGLang": "#d18616", "TLT Server": "#2f81f7"}
GREY = "#7d8590"  # readable on white and on a dark page
CHAIN = "EAGLE-3 chain of 7"


def figures() -> dict[str, Any]:
    """Return milliseconds per plain step, and tokens/s per request with speculation, by batch; and
    tokens/s of a whole long-tailed rollout, by engine.
    """
    others = goals()["others"]
    batches = [int(column) for column in others["columns"]]
    plain, floor = {}, None
    for line in others["step_ms"]:
        if line["engine"] == "weight-read floor":
            floor = line["values"][0]
        elif line["engine"].endswith(", plain"):
            plain[line["engine"].removesuffix(", plain")] = line["values"]
    rated = {
        line["engine"].removesuffix(f", {CHAIN}"): [
            rate / batch for rate, batch in zip(line["values"], batches, strict=False)
        ]
        for line in others["tokens_per_s"]
    }
    for line, step_ms, _ in ours(results(RESULTS)):
        if line["engine"].endswith(", plain"):
            plain["TLT Server"] = [step_ms.get(batch) for batch in batches]
        elif "rated" in line:
            length = others["accept_length"]
            rated["TLT Server"] = [
                round(length / step_ms[batch] * 1e3, 1) for batch in batches if batch in step_ms
            ]
    return {
        "batches": batches,
        "floor_ms": floor,
        "plain_step_ms": plain,
        "accept_length": others["accept_length"],
        "tokens_per_s_per_request": rated,
        "rollout_tokens_per_s": {**others["rollout_tokens_per_s"], **_rollout()},
    }


def _rollout() -> dict[str, float]:
    """Return our tokens/s of 512 requests over HTTP: off, the best fixed chain, the default."""
    rows = {
        row["arm"]: row
        for result in comparable(results(RESULTS), goals())
        if result.bench == "rollout-http" and not result.figures["penalties"]
        for row in result.figures["rows"]
        if (row["workload"], row["pair"]) == ("512", "demo")
    }
    named = {"off": "off", "fixed chain of 7": rows["goodput"]["best_fixed"], "default": "goodput"}
    return {f"TLT Server, {name}": rows[arm]["tokens_per_s"] for name, arm in named.items()}


def colour(engine: str) -> str:
    return next(shade for name, shade in COLOURS.items() if engine.startswith(name))


STYLE = {
    "svg.hashsalt": "tlt",  # the same figures give the same file
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 11,
    "text.color": GREY,
    "axes.labelcolor": GREY,
    "axes.edgecolor": GREY,
    "axes.titlesize": 12,
    "axes.titlelocation": "left",
    "xtick.color": GREY,
    "ytick.color": GREY,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def draw(data: dict[str, Any], file: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update(STYLE)
    from matplotlib import pyplot

    figure, (left, middle, right) = pyplot.subplots(
        1, 3, figsize=(13.5, 3.9), width_ratios=(3, 2, 2.3)
    )
    _draw_steps(left, data)
    _draw_rates(middle, data)
    _draw_rollout(right, data["rollout_tokens_per_s"])
    figure.tight_layout(w_pad=2.5)
    metadata = {"Date": None, "Title": "Speed on one H200", "Description": json.dumps(data)}
    figure.savefig(file, transparent=True, metadata=metadata)
    file.write_text(re.sub(r"[ \t]+$", "", file.read_text(), flags=re.MULTILINE))


def _draw_steps(axes: Any, data: dict[str, Any]) -> None:
    """Draw milliseconds per plain step, and the time in which weights are read once."""
    places, floor_ms = range(len(data["batches"])), data["floor_ms"]
    points = {"textcoords": "offset points"}
    axes.axhline(floor_ms, color=GREY, linestyle="--", linewidth=1.2)
    said = f"floor: weights read once, {floor_ms} ms"
    axes.annotate(said, (places[-1], floor_ms), xytext=(0, -14), ha="right", color=GREY, **points)
    for engine, values in data["plain_step_ms"].items():
        mine = engine == "TLT Server"
        axes.plot(
            places,
            values,
            color=colour(engine),
            marker="o",
            markersize=6 if mine else 4.5,
            linewidth=2.6 if mine else 1.6,
            label=engine,
        )
    for place, value in zip(places, data["plain_step_ms"]["TLT Server"], strict=True):
        steep, low = place == places[-1], value - floor_ms < 0.8
        axes.annotate(
            f"{value:.2f}",
            (place, value),
            xytext=(6, -13) if steep else (0, 7 if low else -15),
            ha="left" if steep else "center",
            color=colour("TLT Server"),
            **points,
        )
    axes.set_xticks(places, [str(batch) for batch in data["batches"]])
    axes.set_xlim(-0.25, len(places) - 0.55)
    axes.set_ylim(2.4, 10)
    axes.set_xlabel("requests at once")
    axes.set_title("Plain decoding: ms per step (lower is better)")
    axes.legend(frameon=False, loc="upper left")


def _draw_rates(axes: Any, data: dict[str, Any]) -> None:
    """Draw tokens per second and request with speculation."""
    rates = data["tokens_per_s_per_request"]
    width = 0.8 / len(rates)
    for number, (engine, values) in enumerate(rates.items()):
        at = [place + (number - (len(rates) - 1) / 2) * width for place in range(len(values))]
        bars = axes.bar(at, values, width * 0.92, color=colour(engine))
        axes.bar_label(bars, [f"{value:.0f}" for value in values], padding=2, fontsize=9)
    axes.set_xticks(range(len(values)), [str(batch) for batch in data["batches"][: len(values)]])
    axes.set_ylim(0, 1.12 * max(map(max, rates.values())))
    axes.set_xlabel("requests at once")
    axes.set_title(
        f"{CHAIN}, accept length {data['accept_length']}:\ntokens/s per request (higher is better)"
    )


def _draw_rollout(axes: Any, rates: dict[str, float]) -> None:
    """Draw tokens per second of a whole rollout, a bar per engine."""
    names = sorted(rates, key=rates.__getitem__)
    bars = axes.barh(names, [rates[name] for name in names], color=[colour(name) for name in names])
    axes.bar_label(bars, [f"{rates[name]:,.0f}" for name in names], padding=3, fontsize=9)
    said = [re.sub(r" [\d.]+, EAGLE-3| Server,", "", name) for name in names]
    axes.set_yticks(names, said)
    axes.set_xlim(0, 1.18 * max(rates.values()))
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    axes.set_title("512 requests with a long tail:\ntokens/s (higher is better)")


def drawn(file: Path) -> dict[str, Any]:
    """Return the figures that a drawing was made from."""
    found = re.search(r"<dc:description>(.*?)</dc:description>", file.read_text(), re.DOTALL)
    assert found, f"{file} has no description"
    return dict(json.loads(found[1].replace("&quot;", '"')))


if __name__ == "__main__":
    draw(figures(), PICTURE)
    print(f"{PICTURE.relative_to(ROOT)} written")
