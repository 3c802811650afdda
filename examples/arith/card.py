"""The model card: every number comes from `figures.json`."""

from __future__ import annotations

from tlt_server.demo.task import RESPONSE_TOKEN_CAP

ROWS = ("8", "16", "32")
INTRODUCTION = """# The demo pair

A small Qwen2 target that does written-out arithmetic, and its EAGLE-3 drafter. Made by the \
scripts in `examples/arith`; every
figure below was measured by `evaluate.py` and stands in `figures.json`. The target imitates \
careful and hasty writers on purpose,
so that it solves only a part of the problems and reinforcement learning has room."""


def table(head: list[object], rows: list[list[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def goals(hot: dict) -> list[list[object]]:
    tokens, accept = hot["tokens"], hot["accept"]
    tail = round(tokens["p99"] / tokens["p50"], 1)
    sixteen, thirty_two = accept["16"]["accept_length"], accept["32"]["accept_length"]
    checks = [
        ("accept length, 16 rows, depth 7, T=1", sixteen, ">= 3.5", sixteen >= 3.5),
        ("accept length, 32 rows, depth 7, T=1", thirty_two, ">= 4.8", thirty_two >= 4.8),
        ("solved at T=1", hot["solved"], "0.40 to 0.70", 0.4 <= hot["solved"] <= 0.7),
        ("p99 / p50 of response tokens", tail, ">= 10", tail >= 10),
        (
            "share ended by the cap, T=1",
            hot["share_at_cap"],
            "<= 0.01",
            hot["share_at_cap"] <= 0.01,
        ),
        (
            "entropy per token (nats), T=1",
            hot["entropy_per_token"],
            "0.1 to 0.4",
            0.1 <= hot["entropy_per_token"] <= 0.4,
        ),
    ]
    return [
        [name, value, wanted, "yes" if reached else "**no**"]
        for name, value, wanted, reached in checks
    ]


def model_card(figures: dict) -> str:
    target, drafter, e = (
        figures["target_training"],
        figures["drafter_training"],
        figures["evaluation"],
    )
    hot, cold, depth = e["T=1"], e["T=0"], e["depth"]
    levels = [str(level + 1) for level in range(depth)]
    deciles = hot["solved_by_length_decile"]
    compared = [
        ["solved", hot["solved"], cold["solved"]],
        *(
            [f"response tokens, {name}", hot["tokens"][name], cold["tokens"][name]]
            for name in ("p50", "p90", "p99", "max", "mean")
        ),
        [
            "responses of 2,000 tokens or more",
            hot["share_at_least_2000_tokens"],
            cold["share_at_least_2000_tokens"],
        ],
        [f"ended by the cap of {RESPONSE_TOKEN_CAP}", hot["share_at_cap"], cold["share_at_cap"]],
        ["entropy, nats per token", hot["entropy_per_token"], ""],
        *(
            [
                f"accept length, depth {depth}, {rows} rows",
                hot["accept"][rows]["accept_length"],
                cold["accept"][rows]["accept_length"],
            ]
            for rows in ROWS
        ),
    ]
    accepted = [
        [f"{rows} rows", *(f"{a:.3f}" for a in hot["accept"][rows]["accepted_at_depth"])]
        for rows in ROWS
    ]
    among = [
        [f"k = {k}", *(f"{e['among_children'][f'step_{level}'][k]:.3f}" for level in levels)]
        for k in ("1", "2", "4", "8")
    ]
    cold_kinds = cold["solved_by_kind"]
    kinds = [
        [
            name,
            kind["share"],
            kind["solved"],
            cold_kinds[name]["solved"] if name in cold_kinds else "",
        ]
        for name, kind in hot["solved_by_kind"].items()
    ]
    parts = [
        INTRODUCTION,
        f"Measured on {e['machine']}, {e['versions']};\n"
        f"{hot['samples']} eval problems at T=1, {cold['samples']} at T=0. Target with bf16 "
        "matmuls; drafter and trees in\n"
        "float32 from the bf16 checkpoint.",
        table(["goal", "measured", "wanted", "reached"], goals(hot)),
        table(["", "T=1", "T=0"], compared),
        "Accept length = tokens per cycle, the bonus included; a response's last cycle counts "
        "only the tokens left. Trees: shared noise,\n"
        f"{e['width']} nodes expanded per level, rows include the root and are chosen by the "
        "calibrated chance.",
        f"At T=0 the countdown search can repeat one try without end: {cold['share_at_cap']:.1%} "
        "of greedy responses end by the cap.\n"
        "Sample at T=1.",
        table(["share of cycles that accept at least this deep, T=1", *levels], accepted),
        table(["the target's token is among k children (parent on the path), T=1", *levels], among),
        table(["kind", "share", "solved, T=1", "solved, T=0"], kinds),
        table(
            ["length decile, T=1: up to tokens", *(d["tokens_up_to"] for d in deciles)],
            [["solved", *(f"{d['solved']:.3f}" for d in deciles)]],
        ),
        f"Target: {e['target_parameters']} parameters, {e['target_layers']} layers; "
        f"{target['step']} steps over "
        f"{target['tokens'] / 1e6:.0f}M tokens (padding included) of\n{target['documents']} "
        "written solutions in "
        f"{target['seconds']:.0f} s, seed {target['seed']}, "
        f"peak learning rate {target['lr']}.",
        f"Drafter: {e['drafter_parameters']} parameters, draft vocabulary {e['draft_vocab']}; "
        f"{drafter['step']} steps over "
        f"{drafter['tokens'] / 1e6:.0f}M tokens (padding included) of\n{drafter['samples']} "
        "samples of the target at T=1 in "
        f"{drafter['seconds']:.0f} s, {drafter['test_steps']} training-time-test steps, seed "
        f"{drafter['seed']}, peak learning rate "
        f"{drafter['lr']}.",
        "Seeds: training problems and sampling noise from `TRAIN_SEEDS`, evaluation from "
        "`EVAL_SEEDS` of `tlt_server/demo/task.py`;\n"
        "disjoint as seeds (a short problem can occur under two).",
        "`drafter/calibration.safetensors`: `survival` [phase, rank, gap bucket] = P(child is the "
        "target's token | its parent is on\n"
        "the path) at T=1; phase 0 = children of the root; gap = distance of perturbed values to "
        "the best child (of the best child: to\n"
        "the second); bucket = number of `gap_edges` at or below the gap. Fitted on "
        f"{e['calibration_samples']} samples of eval\n"
        "problems that the accept lengths do not use.",
    ]
    return "\n\n".join(parts) + "\n"
