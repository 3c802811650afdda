"""The model card: every number comes from `figures.json` in the pair's directory, one JSON object
with a key per script.
"""

from __future__ import annotations

import json
from pathlib import Path

from tlt_server.demo.task import RESPONSE_TOKEN_CAP

CHAINS = (3, 7)
INTRODUCTIONS = {
    "demo": """# The demo pair

A small Qwen2 target that does written-out arithmetic, and its EAGLE-3 drafter. Made by the \
scripts in `examples/arith`; every
figure below was measured by `evaluate.py` and stands in `figures.json`. The target imitates \
careful and hasty writers on purpose,
so that it solves only a part of the problems and reinforcement learning has room.""",
    "hard": """# The hard pair

A target and drafter of the demo pair's shapes, trained on to write noisier text: benches use both \
pairs, because
large models on real reasoning are less predictable than the demo pair. Prompts, tokenizer and \
answers are the demo pair's. Made
by `examples/arith/hard.sh`; the figures below are of `evaluate.py` and stand in `figures.json`. \
The last lines say where accept lengths come from.""",
}


def record_figures(path: Path, key: str, figures: dict) -> None:
    """Set `key` and keep the other keys."""
    known = json.loads(path.read_text()) if path.exists() else {}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(known | {key: figures}, indent=2) + "\n")


def table(head: list[object], rows: list[list[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def between(name: str, value: float, low: float, high: float) -> list[object]:
    return [name, value, f"{low} to {high}", "yes" if low <= value <= high else "**no**"]


def least(name: str, value: float, wanted: float) -> list[object]:
    return [name, value, f">= {wanted}", "yes" if value >= wanted else "**no**"]


def goals(recipe: str, hot: dict) -> list[list[object]]:
    tokens, accept, capped = hot["tokens"], hot["accept"], hot["share_at_cap"]
    tail = ["share ended by the cap, T=1", capped, "<= 0.01", "yes" if capped <= 0.01 else "**no**"]
    long = least("p99 / p50 of response tokens", round(tokens["p99"] / tokens["p50"], 1), 10)
    entropy = "entropy per token (nats), T=1", hot["entropy_per_token"]
    if recipe == "hard":
        chain = hot["accept_chain"]["7"]["accept_length"]
        return [
            between("accept length, chain of 7, T=1", chain, 3, 4),
            between(*entropy, 0.5, 0.8),
            long,
            tail,
        ]
    return [
        least("accept length, 16 rows, depth 7, T=1", accept["16"]["accept_length"], 3.5),
        least("accept length, 32 rows, depth 7, T=1", accept["32"]["accept_length"], 4.8),
        between("solved at T=1", hot["solved"], 0.4, 0.7),
        long,
        tail,
        between(*entropy, 0.1, 0.4),
    ]


def compared(hot: dict, cold: dict | None, depth: int) -> list[list[object]]:
    """Rows of figures at T=1 and, where greedy responses were measured, at T=0."""
    columns = [f for f in (hot, cold) if f]
    rows = [
        ["solved", *(f["solved"] for f in columns)],
        *(
            [f"response tokens, {name}", *(f["tokens"][name] for f in columns)]
            for name in ("p50", "p90", "p99", "max", "mean")
        ),
        ["responses of 2,000 tokens or more", *(f["share_at_least_2000_tokens"] for f in columns)],
        [f"ended by the cap of {RESPONSE_TOKEN_CAP}", *(f["share_at_cap"] for f in columns)],
        ["entropy, nats per token", hot["entropy_per_token"]],
        *(
            [
                f"accept length, depth {depth}, {rows} rows",
                *(f["accept"][rows]["accept_length"] for f in columns),
            ]
            for rows in hot["accept"]
        ),
        *(
            [f"accept length, chain of {chain}", figures["accept_length"]]
            for chain, figures in hot.get("accept_chain", {}).items()
        ),
    ]
    return [row + [""] * (1 + len(columns) - len(row)) for row in rows]


def fitted_on(e: dict) -> str:
    if "drafter_measured" in e:
        return f"{e['calibration_samples']} further ones of the recorded responses."
    return (
        f"{e['calibration_samples']} samples of eval\nproblems that the accept lengths do not use."
    )


def of_the_drafter(figures: dict) -> list[str]:
    """Sentences on how the drafter was trained, or weakened, and measured apart from its target."""
    e = figures["evaluation"]
    trained = "trained by `tlt drafter train` on samples of the target at T=1."
    if drafter := figures.get("drafter_training"):
        trained = (
            f"{drafter['step']} steps over {drafter['tokens'] / 1e6:.0f}M tokens (padding "
            f"included) of\n{drafter['samples']} samples of the target at T=1 in "
            f"{drafter['seconds']:.0f} s, {drafter['test_steps']} training-time-test steps, seed "
            f"{drafter['seed']}, peak learning rate {drafter['lr']}."
        )
    said = [
        f"Drafter: {e['drafter_parameters']} parameters, draft vocabulary {e['draft_vocab']}; "
        + trained
    ]
    if weakened := figures.get("drafter_weakening"):
        said.append(
            "After its training the drafter was weakened to what drafters of large models accept: "
            f"{weakened['keep']:.2f} of each weight's\nway from the demo pair's drafter was kept "
            "(`weaken.py`)."
        )
    if again := figures["evaluation"].get("drafter_measured"):
        said.append(
            f"Accept lengths are those of {again['samples']} recorded responses of the target to "
            f"training problems, measured on {again['machine']} in\nfloat32; all other figures of "
            "the target are from the measurement above."
        )
    return said


def among_children(e: dict, levels: list[str]) -> list[str]:
    """The table of how often a node's children hold the target's token, where it was counted."""
    head = ["the target's token is among k children (parent on the path), T=1", *levels]
    if not (among := e.get("among_children")):
        return []
    rows = [
        [f"k = {k}", *(f"{among[f'step_{level}'][k]:.3f}" for level in levels)]
        for k in ("1", "2", "4", "8")
    ]
    return [table(head, rows)]


def of_the_target(target: dict, e: dict) -> str:
    start = ", from the demo pair's target." if target.get("continued") else "."
    return (
        f"Target: {e['target_parameters']} parameters, {e['target_layers']} layers; "
        f"{target['step']} steps over "
        f"{target['tokens'] / 1e6:.0f}M tokens (padding included) of\n{target['documents']} "
        "written solutions in "
        f"{target['seconds']:.0f} s, seed {target['seed']}, "
        f"peak learning rate {target['lr']}{start}"
    )


def by_kind(hot: dict, cold: dict | None) -> str:
    """Tabulate how many problems of each kind are solved."""
    rows = []
    for name, kind in hot["solved_by_kind"].items():
        greedy = [cold["solved_by_kind"].get(name, {}).get("solved", "")] if cold else []
        rows.append([name, kind["share"], kind["solved"], *greedy])
    return table(["kind", "share", "solved, T=1", *(["solved, T=0"] if cold else [])], rows)


def model_card(figures: dict) -> str:
    target, e = figures["target_training"], figures["evaluation"]
    hot, cold, depth = e["T=1"], e["T=0"], e["depth"]
    levels = [str(level + 1) for level in range(depth)]
    deciles = hot["solved_by_length_decile"]
    accepted = [
        [f"{rows} rows", *(f"{a:.3f}" for a in hot["accept"][rows]["accepted_at_depth"])]
        for rows in hot["accept"]
    ]
    recipe, greedy = target.get("recipe", "demo"), ["T=0"] if cold else []
    parts = [
        INTRODUCTIONS[recipe],
        f"Measured on {e['machine']}, {e['versions']};\n"
        f"{hot['samples']} eval problems at T=1"
        + (f", {cold['samples']} at T=0" if cold else "")
        + ". Target with bf16 "
        "matmuls; drafter and trees in\n"
        "float32 from the bf16 checkpoint.",
        table(["goal", "measured", "wanted", "reached"], goals(recipe, hot)),
        table(["", "T=1", *greedy], compared(hot, cold, depth)),
        "Accept length = tokens per cycle, the bonus included; a response's last cycle counts "
        "only the tokens left. Trees: shared noise,\n"
        f"{e['width']} nodes expanded per level, rows include the root and are chosen by the "
        "calibrated chance.",
        *(
            [
                "At T=0 the countdown search can repeat one try without end: "
                f"{cold['share_at_cap']:.1%} of greedy responses end by the cap.\nSample at T=1."
            ]
            if cold
            else []
        ),
        *(
            [table(["share of cycles that accept at least this deep, T=1", *levels], accepted)]
            if accepted
            else []
        ),
        *among_children(e, levels),
        by_kind(hot, cold),
        table(
            ["length decile, T=1: up to tokens", *(d["tokens_up_to"] for d in deciles)],
            [["solved", *(f"{d['solved']:.3f}" for d in deciles)]],
        ),
        of_the_target(target, e),
        *of_the_drafter(figures),
        "Seeds: training problems and sampling noise from `TRAIN_SEEDS`, evaluation from "
        "`EVAL_SEEDS` of `tlt_server/demo/task.py`;\n"
        "disjoint as seeds (a short problem can occur under two).",
        "`drafter/calibration.json`: `survival` [phase, rank, gap bucket] = P(child is the "
        "target's token | its parent is on\n"
        "the path) at T=1; phase 0 = children of the root; gap = distance of perturbed values to "
        "the best child (of the best child: to\n"
        f"the second); bucket = number of `gap_edges` at or below the gap. "
        f"Fitted on {fitted_on(e)}",
    ]
    return "\n\n".join(parts) + "\n"
