"""`tlt bench rollout`: whole rollouts against a real server, under every policy and several fixed
strategies.

A workload is either a whole rollout, sent as one batch (`512`: the time until the last response is
there), or a number of requests that is kept running all the time (`full 64`: each one that ends is
followed by the next, all of one length). Every seed is one run of every arm; the arms take turns,
and the file of `--json` is written after each seed. The first rollout of all is repeated as the
last; the difference is work that the start left to the first requests. Ratios are medians over the
seeds of one arm's time over another's with the same seed. The server's caches are flushed between
runs, and every response is compared with that of the first arm, tokens and bits of log-probs.
`--against fast` adds a server without speculation in fast numerics, whose responses are others.
`--replicas` times the gateway of a fleet instead, over one of its replicas asked alone.

    tlt bench rollout --quick
    tlt bench rollout --device cuda --model DIR --drafter DIR --json rollout-http.json
    tlt bench rollout --workload 512 --workload "full 64" --policy goodput --policy off
    tlt bench rollout --replicas 2 --kill
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import itertools
import statistics
import time
from collections.abc import Coroutine, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import uvloop
from rich.console import Console

from tlt_client import Client
from tlt_client.errors import InvalidRequest
from tlt_client.wire import Choice, Reply
from tlt_server.bench.load import Connections, samples
from tlt_server.bench.record import finish, save, steps, wide_console
from tlt_server.bench.replaying.names import policy_name
from tlt_server.bench.settings import fingerprint_of, heading, serve_flags, served, settings_of
from tlt_server.bench.tables import OVER_HTTP, show
from tlt_server.demo.server import ServerProcess
from tlt_server.errors import StartupError
from tlt_server.wire.commands import SetPolicy
from tlt_server.wire.records import GenerateRequest, parse_strategy

FIXED = {
    "cpu": ("eagle:4x1x5", "eagle:7x1x8"),
    "cuda": ("eagle:3x1x4", "eagle:7x1x8", "eagle:4x2x8", "eagle:7x4x32"),
}
WORKLOADS = {"cpu": ("64",), "cuda": ("64", "256", "512", "full 64", "full 256")}
SEEDS = (21, 22, 23, 24, 25)  # not those that anything was tuned on
DEFAULT, FAST = "goodput", "off, fast"
SHARED_KV_MB = 16384  # on a GPU that two servers share
PREPARING_S = 0.2  # between two checks whether a policy is active
COUNTERS = {  # metric and label, by figure of a row
    "step_s": ("tlt_measured_step_seconds_total", "kind"),
    "predicted_s": ("tlt_predicted_step_seconds_total", "kind"),
    "decodes": ("tlt_decodes_total", "strategy"),
    "accepted": ("tlt_sd_accepted_tokens_total", "strategy"),
    "passes": ("tlt_steps_total", "kind"),
}
FULL = 4  # times the requests of a full batch that are sent, one after the other
FULL_TOKENS = 192
PENALTIES = {"repetition_penalty": 1.05, "presence_penalty": 0.1}
# Fields of a sampling that the body of a request names.
SENT = ("max_tokens", "temperature", "top_p", "min_tokens", "ignore_eos", *PENALTIES)


class Workload(NamedTuple):
    name: str
    requests: int
    running: int  # requests open at once; 0: all, in one batch

    @classmethod
    def of(cls, name: str) -> Workload:
        full, _, count = name.rpartition(" ")
        return cls(name, FULL * int(count), int(count)) if full else cls(name, int(count), 0)


def sampled(request: GenerateRequest, **how: Any) -> GenerateRequest:
    """Return the request with these fields of its sampling changed."""
    changed = msgspec.structs.replace(request.sampling, **how)
    return msgspec.structs.replace(request, sampling=changed)


def shortened(request: GenerateRequest, max_tokens: int) -> GenerateRequest:
    """Exactly max_tokens, so that the batch stays full until the end."""
    return sampled(request, max_tokens=max_tokens, ignore_eos=True)


class RolloutRun(NamedTuple):
    """One arm over one workload with one seed."""

    seconds: float
    tokens: int
    nats: float  # sum of the tokens' surprise
    digest: bytes  # SHA-256 of tokens and log-probs
    drafted_tokens: int
    accepted_tokens: int
    counted: dict[str, dict[str, float]]  # COUNTERS' figure -> kind or strategy -> sum

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    @property
    def accept_length(self) -> float:
        """Return tokens per request and step with drafts; 0 where none had any."""
        kinds, accepted = (self.counted.get(name, {}) for name in ("decodes", "accepted"))
        decodes = sum(n for name, n in kinds.items() if name != "off")
        return 1 + sum(accepted.values()) / decodes if decodes else 0.0


class Arm(NamedTuple):
    policy: SetPolicy
    numerics: str = "strict"


class RolloutPlan(NamedTuple):
    """Every arm over every workload with every seed."""

    arms: dict[str, Arm]
    workloads: list[Workload]
    seeds: tuple[int, ...]
    max_tokens: int

    @classmethod
    def of(cls, args: argparse.Namespace) -> RolloutPlan:
        commands = args.policy or _commands(args.device)
        arms = {policy_name(command): Arm(command) for command in commands}
        arms |= {FAST: Arm(SetPolicy("off"), "fast")} if args.against else {}
        workloads = [Workload.of(name) for name in args.workload or WORKLOADS[args.device]]
        if not args.quick:
            return cls(arms, workloads, args.seeds or SEEDS, args.max_tokens)
        small = Workload.of("full 4" if workloads[0].running else "16")
        return cls(arms, [small], args.seeds or SEEDS[:2], 96)

    @property
    def turns(self) -> Iterator[tuple[int, Workload, str]]:
        """Yield seeds, workloads and arms in order; another arm begins with each seed."""
        names = [*self.arms]
        for turn, seed in enumerate(self.seeds):
            at = turn % len(names)
            yield from itertools.product((seed,), self.workloads, names[at:] + names[:at])


def run(args: argparse.Namespace) -> int:
    """Print a table and one line of JSON; 0 when every arm gave the responses of the first."""
    if args.numerics != "strict":
        raise StartupError(
            "--numerics is fast; responses are compared bit by bit, which strict numerics alone "
            "keep: leave the flag out"
        )
    if args.against and args.tensor_parallel > 1:
        raise StartupError(
            f"--tensor-parallel is {args.tensor_parallel}; the server in fast numerics that arms "
            "are compared with has one rank: leave --against out"
        )
    settings, plan, console = settings_of(args), RolloutPlan.of(args), wide_console()
    flags = serve_flags(args, plan.max_tokens + 256)
    if args.against and args.device == "cuda":
        flags += ["--kv-memory-mb", str(SHARED_KV_MB)]
    seen: dict[tuple[str, str], list[RolloutRun]] = {}
    total = len(plan.workloads) * len(plan.seeds) * len(plan.arms) + 2
    with ExitStack() as stack, steps(console, total, "rollouts") as step:
        servers = {"strict": stack.enter_context(served(console, flags))}
        if args.against:
            other = [*flags, "--numerics", "fast", "--drafter", "none"]
            servers["fast"] = stack.enter_context(served(console, other))
        said = heading(args, "rollout-http", settings, fingerprint_of(servers["strict"][1]))
        said |= {"seeds": [], "max_tokens": plan.max_tokens, "penalties": bool(args.penalties)}
        said |= {"max_running": args.max_running}

        def played(seed: int, workload: Workload, arm: str) -> RolloutRun:
            requests = requests_of(settings.model, workload, seed, plan.max_tokens)
            requests = [sampled(r, **PENALTIES if args.penalties else {}) for r in requests]
            server, client = servers[plan.arms[arm].numerics]
            found = play(server, client, plan.arms[arm].policy, requests, workload.running)
            step(f"{workload.name}: {arm.replace(':', ' ')}")
            return found

        once = plan.seeds[0], plan.workloads[0], next(iter(plan.arms))
        first = played(*once)
        for seed, turns in itertools.groupby(plan.turns, lambda turn: turn[0]):
            for _, workload, arm in turns:
                seen.setdefault((workload.name, arm), []).append(played(seed, workload, arm))
            said["seeds"] = [*said["seeds"], seed]
            save(args, {**said, **figures(seen, args.pair)})
        later = played(*once)
    summary = {
        **said,
        "first_s": round(first.seconds, 3),
        "later_s": round(later.seconds, 3),
        "first_over_later": round(first.seconds / later.seconds, 3),
        **figures(seen, args.pair),
    }
    summary["responses_differing"] += later.digest != first.digest
    _print(console, summary)
    finish(args, summary)
    return 1 if summary["responses_differing"] else 0


def requests_of(
    model: Path, workload: Workload, seed: int, max_tokens: int
) -> list[GenerateRequest]:
    from tlt_server.demo.workload import problems_as_requests

    requests = problems_as_requests(
        model, workload.requests, group=8, seed=seed, max_tokens=max_tokens
    )
    if not workload.running:
        return requests
    return [shortened(r, min(max_tokens, FULL_TOKENS)) for r in requests]


def set_policy(client: Client, command: SetPolicy) -> None:
    """Put a policy in force. `StartupError`: the server does not have it."""
    try:
        client.set_strategy(command.policy, command.strategy.name if command.strategy else None)
        while client.strategy()["preparing"]:
            time.sleep(PREPARING_S)
    except InvalidRequest as error:
        raise StartupError(f"--policy {policy_name(command)}: {error.message}") from None


def _commands(device: str) -> list[SetPolicy]:
    fixed = [SetPolicy("fixed", parse_strategy(name)) for name in FIXED[device]]
    return [SetPolicy(DEFAULT), SetPolicy("off"), *fixed, SetPolicy("beg")]


def figures(seen: dict[tuple[str, str], list[RolloutRun]], pair: str) -> dict[str, Any]:
    """Return a row per workload and arm, and how many runs in strict numerics gave other responses
    than the first arm's.
    """
    rows, differing = [], 0
    firsts: dict[str, list[RolloutRun]] = {}
    for (workload, arm), runs in seen.items():
        first = firsts.setdefault(workload, runs)
        if arm != FAST:
            differing += sum(a.digest != b.digest for a, b in zip(runs, first, strict=True))
        drafted = sum(r.drafted_tokens for r in runs)
        row: dict[str, Any] = {
            "pair": pair,
            "workload": workload,
            "arm": arm,
            "seconds": round(statistics.median(r.seconds for r in runs), 3),
            "runs_s": [round(r.seconds, 3) for r in runs],
            "tokens": round(statistics.mean(r.tokens for r in runs)),
            "nats_per_token": round(sum(r.nats for r in runs) / sum(r.tokens for r in runs), 3),
            "tokens_per_s": round(statistics.median(r.rate for r in runs)),
            "accept_length": round(statistics.median(r.accept_length for r in runs), 3) or None,
            "accepted_share": round(sum(r.accepted_tokens for r in runs) / drafted, 3)
            if drafted
            else None,
            **{figure: _mean([r.counted.get(figure, {}) for r in runs]) for figure in COUNTERS},
        }
        if (plain := seen.get((workload, "off"))) is not None:
            row["against_off"] = _ratio(plain, runs)
        rows.append(row)
    for row in rows:
        fixed = [
            other
            for other in rows
            if other["workload"] == row["workload"] and other["arm"].startswith("fixed:")
        ]
        if row["arm"] == DEFAULT and fixed:
            best = min(fixed, key=lambda r: r["seconds"])
            row["best_fixed"] = best["arm"]
            row["against_best_fixed"] = _ratio(
                seen[row["workload"], best["arm"]], seen[row["workload"], DEFAULT]
            )
    return {"rows": rows, "responses_differing": differing}


def _mean(counted: list[dict[str, float]]) -> dict[str, float]:
    """Return the mean of each label over the runs, without those that are zero in all."""
    labels = sorted({label for each in counted for label, value in each.items() if value})
    return {
        label: round(statistics.mean(each.get(label, 0.0) for each in counted), 3)
        for label in labels
    }


def _ratio(slower: list[RolloutRun], faster: list[RolloutRun]) -> float:
    """Return the median over seeds of how many times faster the second is."""
    ratios = [a.seconds / b.seconds for a, b in zip(slower, faster, strict=True)]
    return round(statistics.median(ratios), 3)


def play(
    server: ServerProcess,
    client: Client,
    policy: SetPolicy,
    requests: list[GenerateRequest],
    running: int,
) -> RolloutRun:
    """Run requests under a policy, from empty caches: `running` at once, or all in one batch."""
    set_policy(client, policy)
    client.clear_cache()
    before = _counted(client)
    seconds, choices = answered(server.url, requests, running)
    after = _counted(client)
    digest, nats, tokens, drafted, accepted = hashlib.sha256(), 0.0, 0, 0, 0
    for choice in choices:
        digest.update(repr((choice.token_ids, choice.logprobs, choice.finish_reason)).encode())
        nats -= sum(choice.logprobs)
        tokens += len(choice.token_ids)
        drafted += choice.sd.drafted
        accepted += choice.sd.accepted
    counted = {
        figure: {label: sums[label] - before[figure].get(label, 0.0) for label in sums}
        for figure, sums in after.items()
    }
    return RolloutRun(seconds, tokens, nats, digest.digest(), drafted, accepted, counted)


def answered(
    url: str, requests: list[GenerateRequest], running: int, key: str = ""
) -> tuple[float, list[Choice]]:
    """Send the requests, `running` at once or all in one batch; return the seconds and the
    choices.
    """
    each = [[request] for request in requests] if running else [requests]
    bodies = [body(some) for some in each]
    seconds, contents = uvloop.run(_sent(url, bodies, running or 1, key))
    results = [r for content in contents for r in msgspec.json.decode(content, type=Reply).results]
    for result in results:
        if result.error is not None:
            raise StartupError(f"a request failed: {result.error.message}")
    return seconds, [choice for result in results for choice in result.choices]


def body(requests: list[GenerateRequest], **options: object) -> bytes:
    """Return the body of a call of `/generate`."""
    items = [
        {
            "token_ids": r.token_ids,
            "seed": r.seed,
            "group_id": r.group_id,
            "sampling": {name: getattr(r.sampling, name) for name in SENT},
        }
        for r in requests
    ]
    return msgspec.json.encode({"requests": items, "timeout_s": 600, **options})


async def _sent(url: str, bodies: list[bytes], at_once: int, key: str) -> tuple[float, list[bytes]]:
    """Send the bodies in order, some at once; return the seconds and the replies in order."""
    connections, waiting = Connections(url, answer_s=600, key=key), iter(enumerate(bodies))
    replies = [b""] * len(bodies)

    async def sender() -> None:
        for i, body in waiting:
            replies[i] = (await connections.asked("/generate", body)).body

    senders: Iterator[Coroutine[Any, Any, None]] = (sender() for _ in range(at_once))
    started = time.perf_counter()
    await asyncio.gather(*senders)
    seconds = time.perf_counter() - started
    connections.close()
    return seconds, replies


def _counted(client: Client) -> dict[str, dict[str, float]]:
    """Return the server's `COUNTERS` so far."""
    figures = {metric: (figure, label) for figure, (metric, label) in COUNTERS.items()}
    sums: dict[str, dict[str, float]] = {figure: {} for figure in COUNTERS}
    for sample in samples(client):
        if sample.name in figures:
            figure, label = figures[sample.name]
            sums[figure][sample.labels[label]] = sample.value
    return sums


def _print(console: Console, summary: dict[str, Any]) -> None:
    title = (
        "tlt bench rollout: medians over seeds; times faster than off, and than the best "
        "fixed strategy"
    )
    columns = {**OVER_HTTP, "accept length": "{accept_length:.2f}"}
    show(console, title, columns, summary["rows"])
    console.print(
        f"first rollout after the start {summary['first_s']:.2f} s, the same again at the end "
        f"{summary['later_s']:.2f} s; runs whose responses differ: {summary['responses_differing']}"
    )
