"""Sections about fleets: against one server, exactness, and weight pushes."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.markdown import Figures, lines, model, table
from tlt_server.bench.tables import FLEET, FLEET_ROLLOUT


def rollout(figures: Figures) -> Iterator[str]:
    yield model(figures)
    yield (
        f"{figures['replicas']} replicas through their gateway, and one of them asked alone; "
        "`full n`: a batch of n equal requests for each replica. Differing tokens: "
        f"{figures['tokens_differing']}, log-probs: {figures['logprobs_differing']}."
    )
    if figures.get("device") != "cpu":  # where all share its cores
        yield (
            f"Added to the first token: {figures['added_p50_ms']:.1f} ms at p50, "
            f"{figures['added_p99_ms']:.1f} ms at p99."
        )
    if "streams_lost" in figures:
        yield (
            f"A killed replica: its {figures['streams_lost']} streams went on within "
            f"{figures['resumed_s']:.2f} s, at most {figures['beyond_reading_s']:.2f} s later than "
            "reading their tokens again takes. Longest gap of the others: "
            f"{figures['others_longest_gap_ms']:.0f} ms. Routed again after "
            f"{figures['routed_again_s']:.0f} s."
        )
    if "noticed_s" in figures:
        yield (
            f"A stopped replica is taken out after {figures['noticed_s']:.1f} s. The first token "
            f"came {figures['gateway_again_s']:.1f} s after the start of a gateway that was killed."
        )
    for row in figures["rows"]:
        if row.get("over_simulated") is not None and figures.get("device") != "cpu":
            yield (
                f"{row['workload']} requests, {row['policy']}: {row['fleet_s']:.2f} s, "
                f"{row['over_simulated']:.2f} of the simulated {row['simulated_s']:.2f} s."
            )
        if row["policy"].startswith("fixed:history"):
            yield (
                f"{row['workload']} requests, {row['policy']}: {row['one_accept_length']:.2f} "
                "tokens per step with a draft where siblings share a server, "
                f"{row['fleet_accept_length']:.2f} where they are spread."
            )
    yield table(FLEET_ROLLOUT, figures["rows"])


def exact(figures: Figures) -> Iterator[str]:
    pushes = ", ".join(f"{count} by {channel}" for channel, count in figures["pushes"].items())
    yield model(figures)
    yield (
        f"{figures['requests']} requests through a fleet of {figures['replicas']}, with "
        f"{figures['strategies']} strategies, {figures['kills']} kills, {figures['drains']} "
        f"drains, {figures['moves']} moves of requests, and pushes ({pushes}): "
        f"{figures['tokens_differing']} of {figures['tokens']} tokens differ from those of one "
        f"server alone, and {figures['logprobs_differing']} log-probs."
    )
    if "never_moved_at_most" in figures:
        yield f"Requests that never moved: at most {figures['never_moved_at_most']}."


def weights(figures: Figures) -> Iterator[str]:
    [one], [fleet] = figures["one"], figures["fleet"]
    yield (
        f"{figures['bytes'] / 1e9:.2f} GB by disk to {figures['replicas']} replicas take "
        f"{figures['over_one']:.2f} times as long as to one ({one['push_s']:.2f} s). At most "
        f"{fleet['first_to_last_commit_ms']:.0f} ms from the first commit to the last; longest gap "
        f"between tokens {fleet['longest_gap_ms']:.0f} ms. A replica that has none takes them from "
        f"another one with {figures['catch_up_gb_per_s']:.2f} GB/s."
    )


def frontend(figures: Figures) -> Iterator[str]:
    yield (
        f"A gateway over the links of {figures['replicas']} servers, whose engines are simulated "
        f"and decode 256 requests each: {figures['tokens_per_cpu_s']} tokens per CPU-second, whole "
        f"replies, without HTTP. It took {figures['gateway_percent']:.0f} % of a core at "
        f"{figures['tokens_per_s']} tokens/s; {figures['full_rate']} tokens/s take "
        f"{figures['full_rate_percent']:.0f} %."
    )


def simulated(figures: Figures) -> Iterator[str]:
    yield (
        "The gateway's own code in virtual time over replicas with the measured times of a 7B "
        "target on an H200 (see `tlt_server/bench/fleets/replica.py`), all requests sent at once, "
        "lengths log-normal (median 2,500, sigma 1.1, at most 32,768), groups of 16. Means over "
        "seeds that nothing was tuned with. `consolidation F`: replicas are emptied where that "
        "slows no sequence by more than F. `clairvoyant`: the longest outputs are known."
    )
    yield table(FLEET, figures["rows"])


def faults(figures: Figures) -> Iterator[str]:
    rows = figures["rows"]
    yield (
        f"{figures['schedules']} schedules of faults, each of 5 faults, 50 requests and 5 pushes "
        "over 3 to 64 simulated replicas; violations of a rule: "
        f"{figures['violations']}. Faults by the phase of a push in which they began:"
    )
    yield lines([*rows[0]], ([str(cell) for cell in row.values()] for row in rows))
