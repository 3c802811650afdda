"""Sections about the engine alone: its steps, graphs, exactness, and the padded pair."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.goals import agree
from benchmarks.markdown import Figures, lines, model, table
from tlt_server.bench.tables import CYCLE, DECODE, LORA, STRUCTURES, number

PREFILL = {
    "prompts": "{prompts} x {length}",
    "with": "{with}",
    "ms": "{ms:.1f}",
    "tokens/s": "{tokens_per_s!n}",
    "against cuBLAS + SDPA": "{ratio:.2f}x",
}
QUALITY = {
    "model": "{model}",
    "computed in": "{computed}",
    "tokens": "{tokens}",
    "mean": "{mean:.5f}",
    "99.9 %": "{p999:.4f}",
    "KL": "{divergence:.1e}",
}
FP8_MATMULS = {
    "rows": "{rows}",
    "leaves": "{leaves}",
    "ms": "{products_ms:.3f}",
    "of bfloat16": "{of_bfloat16:.3f}",
    "of the library": "{of_cublas}",
    "of memory": "{of_memory:.2f}",
    "TFLOP/s": "{TFLOP/s}",
}
SMALLEST_SHARE = 0.01  # part of a cycle; kernels that take less are summed in one row
SHORT_PROMPT = 128  # tokens; cycles after longer prompts are not broken down
FULL_SIZE = 28  # layers; a cycle of a smaller model is not broken down


def decode(figures: Figures) -> Iterator[str]:
    yield model(figures)
    own = {name: figures[name] for name in ("numerics", "quantization") if name in figures}
    prices: dict[tuple[object, ...], dict[str, str]] = {}
    for row in figures.get("price", ()):
        case = (row.get("batch", row.get("prompts")), row.get("prompt", row.get("length")))
        name = row.get("against", "fast")
        text = f"{row['percent']:+.1f} %" if name == "fast" else f"{1 + row['percent'] / 100:.2f}x"
        prices.setdefault((row["what"], *case), {})[name] = text
    known = {name for found in prices.values() for name in found}
    if "fast" in known:
        yield (
            f"The price of {figures['numerics']} numerics is their time over the time of fast "
            "numerics, less one."
        )
    if "none" in known:
        yield "`of bf16`: the time over that of the same engine without FP8, in the same run."
    yield table(
        DECODE | ({"of bf16": "{none}"} if "none" in known else {}),
        (
            {**row, **prices.get(("decode", row["batch"], row["prompt"]), {})}
            for row in figures["rows"]
            if agree(row, own)
        ),
    )
    for row in figures.get("prefill", ()):
        if agree(row, own):
            found = prices.get(("prefill", row["prompts"], row["length"]), {})
            said = f", price {found['fast']}" if "fast" in found else ""
            said += f", {found['none']} the time of bf16" if "none" in found else ""
            yield (
                f"Prefill by the engine, {row['prompts']} x {row['length']} tokens: "
                f"{number(row['tokens_per_s'])} tokens/s{said}."
            )


def prefill(figures: Figures) -> Iterator[str]:
    yield "The decoder's layers alone: no LM head, no drafter, no scheduler. The three take turns."
    yield table(PREFILL, figures["rows"])


def cycle(figures: Figures) -> Iterator[str]:
    yield model(figures)
    yield (
        "After random prompts, answers are noise to the drafter. `problem`: problems of the demo "
        "task, one after another, each to its end, without the prompt and its first 3 cycles."
    )
    large = figures["shape"]["layers"] >= FULL_SIZE
    yield table(CYCLE, (row for row in figures["rows"] if row["prompt"] == "problem" or large))
    profiled = [
        row
        for row in figures["rows"]
        if "longest_kernels_ms" in row and row["prompt"] == SHORT_PROMPT
    ]
    if profiled and large:
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
    return lines(
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


def padded(figures: Figures) -> Iterator[str]:
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


def structures(figures: Figures) -> Iterator[str]:
    yield model(figures)
    yield (
        "Time per token of requests with a JSON schema over that of requests without, which take "
        "turns; and what of it is masks. A schema of 50 fields compiles in "
        f"{figures['compile_ms']:.1f} ms."
    )
    yield table(STRUCTURES, figures["rows"])


def lora(figures: Figures) -> Iterator[str]:
    yield model(figures)
    yield "Time of a step of requests of two adapters over that of requests without, in turns."
    yield table(LORA, figures["rows"])


def schemas(figures: Figures) -> Iterator[str]:
    yield (
        f"A model of random weights answers {figures['schemas']} generated JSON schemas, "
        f"speculated on: all {figures['ended']} answers that end within 400 tokens are valid, by "
        f"jsonschema. Of {figures['tokens']} tokens {figures['accepted']} were accepted drafts."
    )


def graphs(figures: Figures) -> Iterator[str]:
    yield model(figures)
    phases = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in figures["phases_s"].items())
    yield (
        f"{figures['graphs']} graphs in {figures['graph_bytes'] / 1e9:.2f} GB, "
        f"captured in {figures['capture_s']:.1f} s. Ready after {figures['ready_s']:.1f} s "
        f"with a {figures['triton_cache']} Triton cache: {phases}."
    )


def starts(figures: Figures) -> Iterator[str]:
    """Yield one table of all phases; between them a server imports and starts processes."""
    yield "Seconds until `tlt serve` is ready, and those of its phases; the rest is processes."
    phases = dict.fromkeys((name for row in figures["rows"] for name in row["phases_s"]), 0.0)
    columns = {"start": "{start}", "ready": "{ready_s:.1f}"}
    columns |= {name: f"{{{name}:.1f}}" for name in phases}
    yield table(columns, ({**row, **phases, **row["phases_s"]} for row in figures["rows"]))


def exact(figures: Figures) -> Iterator[str]:
    yield (
        f"{model(figures)} {figures['numerics'].capitalize()}: "
        f"{figures['differing_tokens']} of {figures['tokens']} tokens "
        f"({figures['differing_token_rate']:.2%}) and {figures['differing_logprob_bits']} "
        f"log-probs differ; {figures['requests']} runs of requests, {figures['configurations']} "
        f"configurations, {figures['preemptions']} preemptions."
        + (f" Hash of the first run: {figures['bits']}." if "bits" in figures else "")
    )
    if figures.get("scarce_without_preemption"):
        yield (
            "Runs whose pages were to run out and did not, so that this comparison is red: "
            f"{figures['scarce_without_preemption']}."
        )


def matmuls(figures: Figures) -> Iterator[str]:
    shape, ranks = figures["shape"], figures.get("tensor_parallel", 1)
    one = f", one of {ranks} ranks" if ranks > 1 else ""
    fp8 = [row for row in figures["rows"] if "weights" in row]
    yield (
        f"{shape['layers']} layers of {shape['hidden']}{one}. "
        "Time of all matmuls of a step over cuBLAS's, by rows: "
        + ", ".join(
            f"{row['of_cublas']:.3f} ({row['rows']})" for row in figures["rows"] if row not in fp8
        )
        + "."
    )
    if fp8:
        yield "FP8: time over that in bfloat16, and over the library's with the same scales."
        yield table(FP8_MATMULS, ({"of_cublas": "", **row} for row in fp8))


def quality(figures: Figures) -> Iterator[str]:
    yield (
        "Log-probs of the same answers against float32 by transformers: mean and 99.9th percentile "
        "of the difference, and the estimated KL divergence, in nats per token, from the policy "
        "that sampled, which is the engine without quantization."
    )
    yield table(QUALITY, figures["rows"])
