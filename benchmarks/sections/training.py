"""The sections about what the drafter's training costs."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.markdown import number, table
from benchmarks.sections.figures import Figures


def capture(figures: Figures) -> Iterator[str]:
    yield "Cycles of requests whose states a trainer gets, against cycles without capture."
    yield table(
        ("strategy", "batch", "prompt", "ms", "slower by"),
        (
            (
                r["strategy"],
                r["batch"],
                r["prompt"],
                f"{r['step_ms']:.3f}",
                f"{r['slowdown_percent']:.2f} %",
            )
            for r in figures["rows"]
            if r["captured"]
        ),
    )


def interrupt(figures: Figures) -> Iterator[str]:
    states = ", ".join(f"{count} {name}" for name, count in figures["states"].items())
    yield (
        f"{figures['requests']} requests for one token at random moments of a trainer's work "
        f"({states}), which parked {figures['parkings']} times. Plain decoding, batch 1, with a "
        f"parked trainer took {figures['parked_slowdown_percent']:.2f} % more time than before it "
        "began."
    )
    yield table(
        ("ms", *figures["delay_ms"]),
        (
            (name, *(f"{ms:.1f}" for ms in figures[field].values()))
            for name, field in (
                ("first token, trainer paused", "idle_ms"),
                ("delay by an interrupted trainer", "delay_ms"),
            )
        ),
    )


def grpo(figures: Figures) -> Iterator[str]:
    yield (
        "Medians over steps of RL runs with the same bits of tokens, rewards and weights. `in "
        "all`: rollout and pushes, without the policy's update and the drafter's training. "
        "`faster`: the first run's time over this one's at the same step, median and 90 % interval."
    )
    yield table(
        ("run", "steps", "rollout, s", "push, s", "in all, s", "accept length", "faster"),
        (
            (
                r["run"],
                r["steps"],
                f"{r['rollout_s']:.2f}",
                f"{r['push_s'] + r['drafter_push_s']:.2f}",
                f"{r['total_s']:.2f}",
                "" if r["accept_length"] is None else f"{r['accept_length']:.2f}",
                f"{r['ratio']:.2f} [{r['interval'][0]:.2f}, {r['interval'][1]:.2f}]",
            )
            for r in figures["rows"]
        ),
    )


def training(figures: Figures) -> Iterator[str]:
    yield (
        f"Random weights and features, lengths with a long tail, {figures['budget']} tokens a "
        "step. `segment`: what runs between two points where training can be parked. `read`: a "
        "pack's states from the host, which is done during the step before."
    )
    yield table(
        ("objective", "ms per step", "tokens/s", "read, ms", "longest segment, ms", "peak, GiB"),
        (
            (
                name,
                f"{r['step_ms']:.1f}",
                number(r["tokens_per_s"]),
                f"{r['read_ms']:.1f}" if "read_ms" in r else "",
                f"{r['longest_segment_ms']:.1f}",
                f"{r['peak_gib']:.1f}" if "peak_gib" in r else "",
            )
            for name, r in figures["objectives"].items()
        ),
    )
    for name, r in figures.get("recomputed", {}).items():
        yield (
            f"{name} with states that a target of random weights computes before each step: "
            f"{r['prefill_ms']:.1f} ms for {number(r['tokens'])} tokens, {r['step_ms']:.1f} ms "
            f"with the step, {number(r['tokens_per_s'])} tokens/s."
        )
    packed = figures["layouts"]["packed"]["documents_per_s"]
    yield (
        "Layouts of a batch. `padded_losses`: padded batches whose padding is drafted from, too, "
        "with losses, as other trainers do."
    )
    yield table(
        ("layout", "documents/s", "filled", "packed is faster by"),
        (
            (
                name,
                f"{r['documents_per_s']:.1f}",
                f"{r['filled']:.0%}",
                f"{packed / r['documents_per_s']:.2f}x",
            )
            for name, r in figures["layouts"].items()
        ),
    )
    saved = figures["checkpoint"]
    yield (
        f"A checkpoint of {saved['bytes'] / 1e9:.1f} GB holds training up for "
        f"{saved['stall_ms']:.2f} ms; a plain save takes {number(saved['plain_ms'])} ms."
    )


def objectives(figures: Figures) -> Iterator[str]:
    yield (
        f"The demo pair's drafter ({figures['start']}), trained by each objective on the same "
        f"packs of {number(figures['budget'])} tokens, from a record of "
        f"{number(figures['record_tokens'])}. Replayed in chains ({figures['chain']}) on prompts "
        "that are not in it. `at 7B cost`: accept length over the time of a cycle of one request."
    )
    yield table(
        ("objective", "accept length", "by depth, %", "tokens", "s", "tok/s at 7B cost"),
        (
            (
                r["objective"],
                f"{r['accept_length']:.2f}",
                ", ".join(f"{100 * share:.0f}" for share in r["accepted_at_depth"]),
                number(r["tokens"]),
                f"{r['seconds']:.0f}",
                f"{r['tokens_per_s_at_7b']:.0f}",
            )
            for r in figures["rows"]
        ),
    )
