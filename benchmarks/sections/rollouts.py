"""Sections about whole rollouts: in the engine, over HTTP, and replayed."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.markdown import Figures, model, table
from tlt_server.bench.tables import OVER_HTTP, REPLAY

ROLLOUT = {
    "workload / policy": "{name}",
    "wall s": "{wall_s:.2f}",
    "accept length": "{accept_length:.2f}",
    "speed-up": "{speedup:.2f}x",
}


def rollout(figures: Figures) -> Iterator[str]:
    if "shape" in figures:
        yield model(figures)
    yield (
        f"Medians of {figures['rounds']} interleaved rounds; speed-up against the faster of the "
        "two plain engines. Responses that differ from plain decoding: "
        f"{figures['responses_differing']}. `tail`: 64 requests, run to the end; `few` and `full`: "
        "2 and 64 running all the time. Fast numerics give other responses."
    )
    yield table(
        ROLLOUT,
        (
            {**r, "name": name, "accept_length": r["accept_length"] or None}
            for name, r in figures.items()
            if "/" in name
        ),
    )


def rollout_http(figures: Figures) -> Iterator[str]:
    yield model(figures)
    seeds, first = ", ".join(map(str, figures["seeds"])), figures["rows"][0]
    yield (
        "Medians over the seeds; ratios are medians of one seed's times. `full 64`: 64 requests "
        "running all the time."
    )
    yield (
        f"The {first['pair']} pair, {first['nats_per_token']:.2f} nats per token, seeds {seeds}. "
        "Runs with other tokens or bits of log-probs than the first arm's: "
        f"{figures['responses_differing']}."
    )
    if "first_s" in figures:
        yield (
            f"The first rollout after the start took {figures['first_s']:.2f} s, the same again "
            f"at the end {figures['later_s']:.2f} s."
        )
    rows = ({**r, "arm": r["arm"].removeprefix("fixed:")} for r in figures["rows"])
    yield table(OVER_HTTP, rows)


def replay(figures: Figures) -> Iterator[str]:
    yield model(figures)
    yield (
        f"A recorded rollout of {figures['requests']} requests and {figures['tokens']} tokens, "
        "replayed with times of a cost model fitted to it: no policy was run on the GPU. Regret: "
        "time lost against the best choice of every step, its outcome known; expected: the same "
        "with the tokens that acceptance probabilities promise."
    )
    rows = ({**r, "policy": r["policy"].removeprefix("fixed:")} for r in figures["rows"])
    yield table(REPLAY, rows)
