"""One section of the page per bench: tables made of a result's figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.markdown import number, table
from tlt_server.bench.hostile import rows as hostile_rows

Figures = dict[str, Any]

SMALLEST_SHARE = 0.01  # part of a cycle; kernels that take less are summed in one row
SHORT_PROMPT = 128  # tokens; cycles after longer prompts are not broken down
FULL_SIZE = 28  # layers; a cycle of a smaller model is not broken down


def _model(figures: Figures) -> str:
    shape = figures["shape"]
    running = f", at most {figures['max_running']} running" if figures["max_running"] else ""
    return (
        f"{shape['layers']} layers of {shape['hidden']}, {figures['dtype']}, "
        f"drafter {figures['drafter']}{running}."
    )


def _decode(figures: Figures) -> Iterator[str]:
    yield _model(figures)
    priced = {
        (row["batch"], row["prompt"]): f"{row['percent']:+.1f} %"
        for row in figures.get("price", ())
        if row["what"] == "decode"
    }
    if priced:
        yield (
            f"The price of {figures['numerics']} numerics is their time over the time of fast "
            "numerics, less one."
        )
    yield table(
        ("batch", "prompt", "ms per step", "tokens/s", "price"),
        (
            (
                r["batch"],
                r["prompt"],
                f"{r['step_ms']:.3f}",
                number(r["tokens_per_s"]),
                priced.get((r["batch"], r["prompt"]), ""),
            )
            for r in figures["rows"]
            if r["numerics"] == figures["numerics"]
        ),
    )
    rates = {
        (r["prompts"], r["length"], r["numerics"]): r["tokens_per_s"]
        for r in figures.get("prefill", ())
    }
    for row in figures.get("price", ()):
        if row["what"] == "prefill":
            size = (row["prompts"], row["length"])
            rate = rates.get((*size, figures["numerics"]))
            yield (
                f"Prefill by the engine, {size[0]} x {size[1]} tokens: "
                + (f"{number(rate)} tokens/s, " if rate else "")
                + f"price {row['percent']:+.1f} %."
            )


def _prefill(figures: Figures) -> Iterator[str]:
    yield "The decoder's layers alone: no LM head, no drafter, no scheduler. The three take turns."
    yield table(
        ("prompts", "with", "ms", "tokens/s", "against cuBLAS + SDPA"),
        (
            (
                f"{r['prompts']} x {r['length']}",
                r["with"],
                f"{r['ms']:.1f}",
                number(r["tokens_per_s"]),
                f"{r['ratio']:.2f}x",
            )
            for r in figures["rows"]
        ),
    )


def _cycle(figures: Figures) -> Iterator[str]:
    yield _model(figures)
    yield (
        "After random prompts, answers are noise to the drafter. `problem`: problems of the demo "
        "task, one after another, each to its end, without the prompt and its first 3 cycles."
    )
    yield table(
        ("strategy", "batch", "prompt", "ms", "tokens/s", "accept length", "GPU idle"),
        (
            (
                r["strategy"],
                r["batch"],
                r["prompt"],
                f"{r['step_ms']:.3f}",
                number(r["tokens_per_s"]),
                f"{r['accept_length']:.2f}",
                f"{r['gpu_idle_percent']:.2f} %" if "gpu_idle_percent" in r else "",
            )
            for r in figures["rows"]
            if r["prompt"] == "problem" or figures["shape"]["layers"] >= FULL_SIZE
        ),
    )
    profiled = [
        r for r in figures["rows"] if "longest_kernels_ms" in r and r["prompt"] == SHORT_PROMPT
    ]
    if profiled and figures["shape"]["layers"] >= FULL_SIZE:
        yield (
            f"Where cycles at prompt {SHORT_PROMPT} go, by the profiler, in ms. A kernel may be "
            "resident while it waits for the one before; a moment that several share counts for "
            "the first of them."
        )
        yield _kernel_shares(profiled)


def _kernel_shares(profiled: list[Figures]) -> str:
    """Tabulate the kernels that take a share of some cycle worth a row; sum up the others."""
    times = [dict(row["longest_kernels_ms"]) for row in profiled]
    share = {
        name: max(
            of.get(name, 0) / row["profiled_step_ms"]
            for of, row in zip(times, profiled, strict=True)
        )
        for name in {name for of in times for name in of}
    }
    names = sorted(
        (name for name in share if share[name] >= SMALLEST_SHARE),
        key=lambda name: (-share[name], name),
    )
    rest = [sum(of.values()) - sum(of.get(name, 0) for name in names) for of in times]
    return table(
        ("kernel", *(f"{r['strategy']} x {r['batch']}" for r in profiled)),
        [
            ["whole cycle", *(f"{r['profiled_step_ms']:.3f}" for r in profiled)],
            ["kernels and copies", *(r["kernels_per_step"] for r in profiled)],
            *(
                [f"`{name}`", *(f"{of[name]:.3f}" if name in of else "" for of in times)]
                for name in names
            ),
            ["others", *(f"{ms:.3f}" for ms in rest)],
        ],
    )


def _padded(figures: Figures) -> Iterator[str]:
    found = "; ".join(
        f"{r['target']}: mean error {r['mean']}, largest {r['max']}, "
        f"same greedy token {r['greedy_agreement']:.2%}"
        for r in figures["rows"]
    )
    yield (
        f"Logits in {figures['dtype']} against the small target's in float32, both by "
        f"transformers, at {figures['positions']} positions of its greedy answers; the largest "
        f"logit is {figures['largest_logit']}. {found}."
    )


def _graphs(figures: Figures) -> Iterator[str]:
    yield _model(figures)
    phases = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in figures["phases_s"].items())
    yield (
        f"{figures['graphs']} graphs in {figures['graph_bytes'] / 1e9:.2f} GB, "
        f"captured in {figures['capture_s']:.1f} s. Ready after {figures['ready_s']:.1f} s "
        f"with a {figures['triton_cache']} Triton cache: {phases}."
    )


def _exact(figures: Figures) -> Iterator[str]:
    yield (
        f"{_model(figures)} {figures['numerics'].capitalize()} numerics: "
        f"{figures['differing_tokens']} of {figures['tokens']} tokens "
        f"({figures['differing_token_rate']:.2%}) and {figures['differing_logprob_bits']} "
        f"log-probs differ in {figures['requests']} runs of requests over "
        f"{figures['configurations']} configurations, with {figures['preemptions']} preemptions."
    )


def _rollout(figures: Figures) -> Iterator[str]:
    if "shape" in figures:
        yield _model(figures)
    yield (
        f"Medians of {figures['rounds']} interleaved rounds; speed-up against the faster of the "
        "two plain engines. Responses that differ from plain decoding: "
        f"{figures['responses_differing']}. `tail`: 64 requests, run to the end; `full`: 64 "
        "running all the time. Fast numerics give other responses, so where at most 2 run they may "
        "have other work."
    )
    yield table(
        ("workload / policy", "wall s", "accept length", "speed-up", "at most 2 run"),
        (
            (
                name,
                f"{r['wall_s']:.2f}",
                f"{r['accept_length']:.2f}" if r["accept_length"] else "",
                f"{r['speedup']:.2f}x",
                f"{r['tail_speedup']:.2f}x" if "tail_speedup" in r else "",
            )
            for name, r in figures.items()
            if "/" in name
        ),
    )


def _rollout_http(figures: Figures) -> Iterator[str]:
    yield _model(figures)
    seeds, first = ", ".join(map(str, figures["seeds"])), figures["rows"][0]
    yield (
        f"The {first['pair']} pair, {first['nats_per_token']:.2f} nats per token; whole rollouts "
        f"over HTTP, medians over the seeds {seeds}. "
        "`full 64`: 64 requests running all the time. Ratios are medians of one seed's times. "
        "Runs with other tokens or bits of "
        f"log-probs than the first arm's: {figures['responses_differing']}."
    )
    if "first_s" in figures:
        yield (
            f"The first rollout after the start took {figures['first_s']:.2f} s, the same again "
            f"at the end {figures['later_s']:.2f} s."
        )
    yield table(
        ("requests", "policy", "s", "tokens/s", "against off", "against the best fixed"),
        (
            (
                r["workload"],
                r["arm"].removeprefix("fixed:"),
                f"{r['seconds']:.2f}",
                number(r["tokens_per_s"]),
                f"{r['against_off']:.2f}x" if "against_off" in r else "",
                f"{r['against_best_fixed']:.2f}x" if "against_best_fixed" in r else "",
            )
            for r in figures["rows"]
        ),
    )


def _replay(figures: Figures) -> Iterator[str]:
    yield _model(figures)
    yield (
        f"A recorded rollout of {figures['requests']} requests and {figures['tokens']} tokens, "
        "replayed with times of a cost model fitted to it: no policy was run on the GPU. Regret: "
        "time lost against the best choice of every step, its outcome known; expected: the same "
        "with the tokens that survivals promise."
    )
    yield table(
        ("policy", "s", "tokens/s", "accept length", "switches", "regret", "expected"),
        (
            (
                r["policy"].removeprefix("fixed:"),
                f"{r['seconds']:.2f}",
                number(r["tokens_per_s"]),
                f"{r['accept_length']:.2f}",
                r["switches"],
                f"{r['regret']:.1%}",
                f"{r['expected_regret']:.1%}",
            )
            for r in figures["rows"]
        ),
    )


def _overload(figures: Figures) -> Iterator[str]:
    yield table(
        (
            "offered",
            "requests",
            "goodput, tokens/s",
            "of peak",
            "refused",
            "late",
            "refusals p99 ms",
        ),
        (
            (
                name,
                r["requests"],
                number(r["goodput"]),
                f"{r['of_peak']:.2f}",
                f"{r['shed']:.0%}",
                r["late"],
                r["shed_p99_ms"],
            )
            for name, r in figures.items()
            if isinstance(r, dict) and "goodput" in r
        ),
    )
    yield (
        f"Every request has exactly one end: {'yes' if figures['exactly_one_end'] else 'no'}. "
        f"Bounds missed: {', '.join(figures['missed']) or 'none'}."
    )


def _weights(figures: Figures) -> Iterator[str]:
    """Tabulate the pushes of the largest checkpoint; the file has all."""
    largest = max(r["bytes"] for r in figures["rows"])
    yield (
        f"Medians of {figures['rounds']} interleaved rounds, from the trainer's call until the "
        "weights are live, spooled and synced (`--state-dir`). The copy is of the same bytes on "
        "the same disk, synced."
    )
    yield (
        f"Last two columns: {figures['rounds']} more such rounds while {figures['requests']} "
        "requests decode on the same cores; the pause is the longest time at a commit in which no "
        "step could start."
    )
    yield table(
        ("MB", "channel", "seconds", "against a copy", "while decoding", "longest pause, ms"),
        (
            (
                f"{r['bytes'] / 1e6:.0f}",
                r["channel"],
                f"{r['push_s']:.2f}",
                f"{r['ratio']:.2f}x",
                f"{r['push_while_decoding_s']:.2f}",
                f"{r['longest_pause_ms']:.2f}",
            )
            for r in figures["rows"]
            if r["bytes"] == largest
        ),
    )


def _weights_gpu(figures: Figures) -> Iterator[str]:
    spooling = (
        "With `--state-dir`, so every push is also spooled and synced."
        if figures.get("spooled")
        else "Without `--state-dir`, so nothing is spooled."
    )
    yield (
        f"Medians of {figures['rounds']} pushes out of a trainer's GPU memory, while "
        f"{figures['rows'][0]['requests']:.0f} requests decode. {spooling} By ipc trainer and "
        "engine share a GPU, by nccl each has one. Staged: from the first byte until every tensor "
        "has been checked. The gap is the longest wait for a token of any request at these commits."
    )
    headings = (
        "channel",
        "GB",
        "staged, s",
        "GB/s",
        "live, s",
        "pause at commit, ms",
        "gap, ms",
        "token, ms",
        "token while staging, ms",
    )
    yield table(
        headings,
        (
            (
                r["channel"],
                f"{r['bytes'] / 1e9:.1f}",
                f"{r['staged_s']:.2f}",
                f"{r['gb_per_s']:.1f}",
                f"{r['push_s']:.2f}",
                f"{r['pause_ms']:.1f}",
                f"{r['longest_gap_ms']:.1f}",
                f"{r['step_ms']:.2f}",
                f"{r['step_while_staging_ms']:.2f}",
            )
            for r in figures["rows"]
        ),
    )


def _hostile(figures: Figures) -> Iterator[str]:
    yield (
        "What one key's hostile clients do to others, on the shipped pair. `-`: no bound is set. "
        f"Bounds missed: {', '.join(figures['missed']) or 'none'}."
    )
    yield table(
        ("what", "figure", "bound", "aim"),
        (
            (
                row.what,
                f"{figures[row.scenario][row.figure]:.3g} {row.unit}".strip(),
                "-" if row.must == float("inf") else f"{row.must:g}",
                "-" if row.stretch is None else f"{row.stretch:g}",
            )
            for row in hostile_rows(figures)
            if row.scenario in figures
        ),
    )


def _soak(figures: Figures) -> Iterator[str]:
    storms = figures["storms"]
    sent = sum(count for what, count in storms.items() if what.startswith(("http", "grpc")))
    sound = sum(
        count for what, count in storms.items() if what.startswith("sound") and ":" not in what
    )
    failed = sum(came.get("failed", 0) for came in figures["files"].values())
    yield (
        f"{sent} generated requests by HTTP and gRPC, {storms.get('kill', 0)} kills of the engine, "
        f"{storms.get('push', 0)} pushes and {storms.get('full', 0)} spells of a full disk at "
        f"once; {sound} sound results completed, each with the bits of an undisturbed run. "
        f"Tests that failed: {failed}."
    )


def _matmuls(figures: Figures) -> Iterator[str]:
    yield (
        "Time of all matmuls of a step over cuBLAS's, by rows: "
        + ", ".join(f"{row['of_cublas']:.3f} ({row['rows']})" for row in figures["rows"])
        + "."
    )


def _in_the_file(figures: Figures) -> Iterator[str]:
    yield f"{len(figures['rows'])} rows, in the file only."


def _tests(figures: Figures) -> Iterator[str]:
    found = ", ".join(
        f"{name} {r['passed']} / {r['failed']} / {r['skipped']}"
        for name, r in figures["parts"].items()
    )
    yield f"Tests that passed / failed / were skipped: {found}."
    red = [name for r in figures["parts"].values() for name in r.get("red", ())]
    if red:
        yield f"Red: {', '.join(f'`{name}`' for name in red)}."
    exact = figures["exact"]
    if exact:
        yield (
            f"`tlt bench exact --quick` on the shipped pair: {exact['differing_tokens']} tokens "
            f"and {exact['differing_logprob_bits']} log-prob bits differ in {exact['requests']} "
            "runs of requests."
        )


SECTIONS: dict[str, tuple[str, Callable[[Figures], Iterator[str]]]] = {
    "decode": ("Plain decoding", _decode),
    "prefill": ("Prefill against the libraries", _prefill),
    "cycle": ("Cycles of speculation", _cycle),
    "padded": ("What padding and rounding change", _padded),
    "graphs": ("Graphs and start-up", _graphs),
    "exact": ("Exactness", _exact),
    "rollout": ("Rollouts with a long tail", _rollout),
    "rollout-http": ("Rollouts over HTTP", _rollout_http),
    "replay": ("Regret of the policies", _replay),
    "overload": ("Overload", _overload),
    "hostile": ("Hostile clients", _hostile),
    "soak": ("Long tests", _soak),
    "weights": ("Weight pushes on a CPU", _weights),
    "weights-gpu": ("Weight pushes from GPU to GPU", _weights_gpu),
    "products": ("Matmuls alone", _matmuls),
    "attention": ("Single kernels", _in_the_file),
    "norms": ("Single kernels", _in_the_file),
    "sampling": ("Single kernels", _in_the_file),
    "trees": ("Single kernels", _in_the_file),
    "test-gpu": ("Tests on a GPU", _tests),
}
