"""`tlt bench load`: many clients at once against one batch of the same requests.

An engine gives its tokens a step at a time for all sequences. One batch hands them to one reply;
as many clients, whole or streamed, cost the frontend a reply each. Requests are greedy, so the
texts of all ways are compared. Each way is run without log-probs and with that of each token, as
trainers ask. The ways take turns in each round; `of_batch` is the median over rounds of a way's
tokens per second over the batch's.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import uvloop

from tlt_server.bench.load import Connections, RawReply, completion, events
from tlt_server.bench.record import finish, steps, wide_console
from tlt_server.bench.replaying.names import policy_name
from tlt_server.bench.rollout import FIXED, set_policy
from tlt_server.bench.settings import fingerprint_of, heading, serve_flags, served, settings_of
from tlt_server.bench.tables import LOAD, show
from tlt_server.demo.server import ServerProcess
from tlt_server.errors import StartupError
from tlt_server.wire.commands import SetPolicy
from tlt_server.wire.records import parse_strategy

WAYS = ("batch", "whole", "streamed")
LOGPROBS = (None, 0)  # in a request: none, or each token's own
PROMPT_TOKENS = 256  # at most
REPLY_S = 600.0


class LoadRow(NamedTuple):
    """The policy, the way and the log-probs of a round of requests."""

    policy: str
    way: str
    logprobs: int | None


class Sent(NamedTuple):
    """One round of one way."""

    seconds: float
    tokens: int
    frontend_s: float  # processor time of the server's frontend
    texts: list[str]  # by prompt


def run(args: argparse.Namespace) -> int:
    """Print a table and one line of JSON; 0 when the texts of all ways are equal."""
    from tlt_server.demo.workload import problems_as_requests

    settings = settings_of(args)
    count, tokens, rounds = (
        (16, 48, 1) if args.quick else (args.clients, args.max_tokens, args.rounds)
    )
    prompts = [
        [*request.token_ids]
        for request in problems_as_requests(settings.model, count, group=1, seed=args.seed)
    ]
    commands = args.policy or [
        SetPolicy("off"),
        SetPolicy("fixed", parse_strategy(FIXED[args.device][0])),
    ]
    ways = [*product(WAYS, LOGPROBS)]
    console = wide_console()
    flags = serve_flags(args, tokens + PROMPT_TOKENS)
    seen: dict[LoadRow, list[Sent]] = {}
    total = len(commands) * (1 + rounds * len(ways))
    with served(console, flags) as (server, client), steps(console, total) as step:

        def play(command: SetPolicy, way: str, logprobs: int | None) -> Sent:
            step(f"{policy_name(command).replace(':', ' ')} {way}")
            set_policy(client, command)
            client.clear_cache()
            return uvloop.run(_send(server, prompts, tokens, way, logprobs))

        for command in commands:
            play(command, *ways[0])  # prepares the kernels of a policy's first steps
        for _ in range(rounds):
            for command, way in product(commands, ways):
                seen.setdefault(LoadRow(policy_name(command), *way), []).append(play(command, *way))
        summary = heading(args, "load", settings, fingerprint_of(client)) | figures(seen)
    summary |= {"clients": count, "max_tokens": tokens, "rounds": rounds}
    summary |= {"max_running": args.max_running}
    title = (
        f"tlt bench load: {count} requests of {tokens} tokens, sent at once by one client or by as "
        "many"
    )
    show(console, title, {**LOAD, "log-probs": "{logprobs}"}, summary["rows"])
    console.print(f"texts that differ from the batch's: {summary['texts_differing']}")
    finish(args, summary)
    return 1 if summary["texts_differing"] else 0


def figures(seen: dict[LoadRow, list[Sent]]) -> dict[str, Any]:
    """Return a row per policy, way and log-probs, and the number of texts that differ from the
    batch's.
    """
    rows, differing = [], 0
    for row, runs in seen.items():
        batches = seen[row._replace(way=WAYS[0])]
        differing += sum(
            own != text
            for run, batch in zip(runs, batches, strict=True)
            for own, text in zip(run.texts, batch.texts, strict=True)
        )
        ratios = [
            (run.tokens / run.seconds) / (batch.tokens / batch.seconds)
            for run, batch in zip(runs, batches, strict=True)
        ]
        rows.append(
            {
                **row._asdict(),
                "clients": 1 if row.way == WAYS[0] else len(runs[0].texts),
                "tokens_per_s": round(statistics.median(r.tokens / r.seconds for r in runs)),
                "of_batch": round(statistics.median(ratios), 3),
                "frontend_us_per_token": round(
                    statistics.median(r.frontend_s / r.tokens for r in runs) * 1e6, 1
                ),
                "runs_s": [round(r.seconds, 3) for r in runs],
            }
        )
    return {"rows": rows, "texts_differing": differing}


async def _send(
    server: ServerProcess, prompts: list[list[int]], tokens: int, way: str, logprobs: int | None
) -> Sent:
    """Send all prompts at once in one of the ways, and wait for the last reply."""
    asked: dict[str, Any] = {
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0.0,
        "logprobs": logprobs,
    }
    if way == "streamed":
        asked |= {"stream": True, "stream_options": {"include_usage": True}}
    each = [prompts] if way == "batch" else prompts
    bodies = [msgspec.json.encode({"prompt": prompt, **asked}) for prompt in each]
    connections = Connections(server.url)
    await connections.open(len(bodies))
    cpu_s, began_s = processor_s(server.process.pid), time.perf_counter()
    try:
        async with asyncio.timeout(REPLY_S):
            replies = await asyncio.gather(
                *(connections.send("/v1/completions", body) for body in bodies)
            )
    except (OSError, TimeoutError) as error:
        raise StartupError(f"/v1/completions did not answer in full: {error!r}") from None
    seconds = time.perf_counter() - began_s
    cpu_s = processor_s(server.process.pid) - cpu_s
    connections.close()
    read = [read_completion(reply) for reply in replies]
    return Sent(seconds, sum(count for count, _ in read), cpu_s, [t for _, ts in read for t in ts])


def read_completion(reply: RawReply) -> tuple[int, list[str]]:
    """Return the tokens and the texts, by prompt, of a whole or streamed completion."""
    if reply.status != 200:
        raise StartupError(f"/v1/completions answers {reply.status}: {reply.body[:300]!r}")
    body, texts = reply.body, dict[int, str]()
    parts = [*events(body)] if body.startswith(b"data: ") else [completion(body)]
    for part in parts:
        for choice in part.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    tokens = sum(part.usage.completion_tokens for part in parts if part.usage is not None)
    return tokens, [texts[index] for index in sorted(texts)]


def processor_s(pid: int) -> float:
    """Return the processor time that a process has taken."""
    try:
        said = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        raise StartupError(
            "this bench reads the processor time of its server from /proc, which is missing; run "
            "it on Linux"
        ) from None
    return (int(said[11]) + int(said[12])) / os.sysconf("SC_CLK_TCK")
