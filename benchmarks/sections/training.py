"""The sections about the cost of the drafter's training."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.markdown import Figures, table
from tlt_server.bench.tables import number

CAPTURE = {
    "strategy": "{strategy}",
    "batch": "{batch}",
    "prompt": "{prompt}",
    "ms": "{step_ms:.3f}",
    "slower by": "{slowdown_percent:.2f} %",
}
GRPO = {
    "run": "{run}",
    "steps": "{steps}",
    "rollout, s": "{rollout_s:.2f}",
    "push, s": "{pushes_s:.2f}",
    "in all, s": "{total_s:.2f}",
    "accept length": "{accept_length:.2f}",
    "faster": "{ratio:.2f} [{interval[0]:.2f}, {interval[1]:.2f}]",
}
CORRECTIONS = {
    "server": "{quantization}",
    "correction": "{correction}",
    "reward": "{reward:.3f}",
    "second half": "{later_reward:.3f}",
    "spread": "{spread:.3f}",
    "log-prob difference": "{mean_difference:.5f}",
    "largest": "{largest_difference:.2f}",
    "KL": "{divergence:.1e}",
    "clipped": "{clipped:.3%}",
}
TRAINING = {
    "objective": "{objective}",
    "ms per step": "{step_ms:.1f}",
    "tokens/s": "{tokens_per_s!n}",
    "read, ms": "{read_ms:.1f}",
    "longest segment, ms": "{longest_segment_ms:.1f}",
    "peak, GiB": "{peak_gib:.1f}",
}
LAYOUTS = {
    "layout": "{layout}",
    "documents/s": "{documents_per_s:.1f}",
    "filled": "{filled:.0%}",
    "packed is faster by": "{faster:.2f}x",
}
OBJECTIVES = {
    "objective": "{objective}",
    "accept length": "{accept_length:.2f}",
    "by depth, %": "{by_depth}",
    "tokens": "{tokens!n}",
    "s": "{seconds:.0f}",
    "tok/s at 7B cost": "{tokens_per_s_at_7b:.0f}",
}


def capture(figures: Figures) -> Iterator[str]:
    yield "Cycles of requests whose states a trainer gets, against cycles without capture."
    yield table(CAPTURE, (row for row in figures["rows"] if row["captured"]))


def interrupt(figures: Figures) -> Iterator[str]:
    states = ", ".join(f"{count} {name}" for name, count in figures["states"].items())
    yield (
        f"{figures['requests']} requests for one token at random moments of a trainer's work "
        f"({states}), which parked {figures['parkings']} times. Plain decoding, batch 1, with a "
        f"parked trainer took {figures['parked_slowdown_percent']:.2f} % more time than before it "
        "began."
    )
    columns = {"ms": "{of}"} | {name: f"{{{name}:.1f}}" for name in figures["delay_ms"]}
    yield table(
        columns,
        (
            {"of": "first token, trainer paused", **figures["idle_ms"]},
            {"of": "delay by an interrupted trainer", **figures["delay_ms"]},
        ),
    )


def grpo(figures: Figures) -> Iterator[str]:
    yield (
        "Medians over steps of RL runs with the same bits of tokens, rewards and weights. `in "
        "all`: rollout and pushes, without the policy's update and the drafter's training. "
        "`faster`: the first run's time over this one's at the same step, median and 90 % interval."
    )
    rows = ({**r, "pushes_s": r["push_s"] + r["drafter_push_s"]} for r in figures["rows"])
    yield table(GRPO, rows)


def corrections(figures: Figures) -> Iterator[str]:
    first = figures["rows"][0]
    yield (
        f"{first['runs']} GRPO runs each of {first['steps']} steps of {figures['prompts']} prompts "
        f"x {figures['group']}, the same problems for all. `ratio`: the clipped ratio is to the "
        "server's log-probs; `truncated`: to the policy's, with truncated importance weights; "
        "`none`: as if both had the same. `spread`: of the second half's reward between runs."
    )
    yield table(CORRECTIONS, figures["rows"])


def training(figures: Figures) -> Iterator[str]:
    yield (
        f"Random weights and features, lengths with a long tail, {figures['budget']} tokens a "
        "step. `segment`: what runs between two points where training can be parked. `read`: a "
        "pack's states from the host, which is done during the step before."
    )
    rows = ({**r, "objective": name} for name, r in figures["objectives"].items())
    yield table(TRAINING, rows)
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
        LAYOUTS,
        (
            {**r, "layout": name, "faster": packed / r["documents_per_s"]}
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
        OBJECTIVES,
        (
            {**r, "by_depth": ", ".join(f"{100 * share:.0f}" for share in r["accepted_at_depth"])}
            for r in figures["rows"]
        ),
    )
