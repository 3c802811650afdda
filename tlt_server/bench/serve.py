"""`tlt bench serve`: an open loop of random prompts against any server with the OpenAI API, and the
figures of `vllm bench serve` for it.

A request is timed from the moment it was sent. TTFT is the time to its first tokens; ITL the time
between two arrivals of tokens, each of several where drafts were accepted; TPOT the time per token
after the first; E2EL the time to its last tokens. Goodput counts requests within all objectives.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import httpx
import msgspec
import uvloop

from tlt_client.arguments import bearer
from tlt_server.bench.goodput import percentile
from tlt_server.bench.load import Answer, Connections, events, poisson, sent_at
from tlt_server.bench.record import finish, wide_console
from tlt_server.bench.tables import show
from tlt_server.errors import StartupError
from tlt_server.push.calling import key_in

TIMES = ("ttft", "tpot", "itl", "e2el")
PERCENTILES = (50, 90, 95, 99)
ANSWER_S = 3600.0
SAID = 300  # bytes of a failed answer that are shown


class StreamTimes(NamedTuple):
    """A request that was answered in full; times in ms."""

    tokens: int
    ttft: float
    tpot: float
    e2el: float
    itl: list[float]


def run(args: argparse.Namespace) -> int:
    """Print a table and one line of JSON. Return 1 when a request was not answered in full."""
    key = key_in(args.api_key_file) or ""
    started_s = time.perf_counter()
    answers = uvloop.run(_load(args, _model(args.url, key), key))
    found = figures(answers, time.perf_counter() - started_s, args.input_len, args.goodput)
    times = [{"ms": name.upper(), **found[f"{name}_ms"]} for name in TIMES]
    columns = {heading: f"{{{heading}}}" for heading in times[0]}
    title = f"tlt bench serve: {args.num_prompts} requests to {args.url}"
    show(wide_console(), title, columns, times)
    if failure := next((answer for answer in answers if times_of(answer) is None), None):
        said = failure.body[:SAID].decode(errors="replace")
        print(f"{found['failed']} requests failed; the first with HTTP {failure.status}: {said}")
    asked = {"request_rate": args.request_rate or "inf", "output_len": args.output_len}
    finish(args, {"bench": "serve", **asked, **found}, on_gpu=False)
    return 1 if found["failed"] else 0


def _model(url: str, key: str) -> str:
    """Return the name of the server's first model."""
    try:
        reply = httpx.get(f"{url}/v1/models", headers=bearer(key or None), timeout=10)
        return str(reply.raise_for_status().json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise StartupError(
            f"{url}/v1/models does not name a model ({type(error).__name__}); start a server, or "
            "name another --url or --api-key-file"
        ) from None


async def _load(args: argparse.Namespace, model: str, key: str) -> list[Answer]:
    connections, draw = Connections(args.url, ANSWER_S), random.Random(args.seed)
    moments_s = (
        poisson(args.request_rate, args.seed) if args.request_rate else itertools.repeat(0.0)
    )

    async def ask(due_s: float) -> Answer:
        body = {
            "model": model,
            "prompt": [draw.randrange(args.vocab) for _ in range(args.input_len)],
            "max_tokens": args.output_len,
            "ignore_eos": True,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return await connections.post("/v1/completions", msgspec.json.encode(body), due_s, key)

    try:
        return await sent_at(ask, itertools.islice(moments_s, args.num_prompts))
    finally:
        connections.close()


def figures(
    answers: list[Answer], seconds: float, input_len: int, objectives: Mapping[str, float]
) -> dict[str, Any]:
    """Return counts, rates per second over `seconds`, and mean and percentiles of each time."""
    served = [one for answer in answers if (one := times_of(answer)) is not None]
    good = sum(
        all(getattr(one, name) <= limit_ms for name, limit_ms in objectives.items())
        for one in served
    )
    tokens = sum(one.tokens for one in served)
    lag_ms = [(answer.sent_s - answer.due_s) * 1e3 for answer in answers]
    return {
        "completed": len(served),
        "failed": len(answers) - len(served),
        "duration_s": round(seconds, 3),
        "requests_per_s": round(len(served) / seconds, 3),
        "output_tokens_per_s": round(tokens / seconds, 1),
        "total_tokens_per_s": round((tokens + input_len * len(served)) / seconds, 1),
        "goodput_per_s": round(good / seconds, 3),
        "objectives_ms": dict(objectives),
        "ttft_ms": _summary([one.ttft for one in served]),
        "tpot_ms": _summary([one.tpot for one in served if one.tokens > 1]),
        "itl_ms": _summary([gap for one in served for gap in one.itl]),
        "e2el_ms": _summary([one.e2el for one in served]),
        "load_lag_p99_ms": round(percentile(lag_ms, 99), 3),
    }


def times_of(answer: Answer) -> StreamTimes | None:
    """Return the times of an answer; None if it was refused, cut off or not a stream."""
    arrivals_s, tokens = [], 0
    try:
        for chunk in answer.chunks if answer.status == 200 else ():
            said = [*events(chunk.data)]
            if any(choice.text or choice.finish_reason for e in said for choice in e.choices):
                arrivals_s.append(chunk.at_s)
            tokens = next((e.usage.completion_tokens for e in said if e.usage), tokens)
    except msgspec.MsgspecError:
        return None
    if not arrivals_s or not tokens or b"data: [DONE]" not in answer.body:
        return None
    ttft, e2el = ((moment_s - answer.sent_s) * 1e3 for moment_s in (arrivals_s[0], arrivals_s[-1]))
    gaps = [(after - before) * 1e3 for before, after in itertools.pairwise(arrivals_s)]
    return StreamTimes(tokens, ttft, (e2el - ttft) / max(1, tokens - 1), e2el, gaps)


def _summary(values: list[float]) -> dict[str, float]:
    mean = statistics.fmean(values) if values else 0.0
    return {"mean": round(mean, 3)} | {
        f"p{part}": round(percentile(values, part), 3) for part in PERCENTILES
    }
