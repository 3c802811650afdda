"""`tlt bench frontend`: tokens that the frontend takes from an engine to its clients, per second of
processor time, by the number of tokens in an output.

The events of an engine that decodes a batch are made before. A run decodes them, routes the
outputs, grows the choices, and encodes what clients get: one whole reply, a whole reply to each of
128 clients, the same with the journal of a rollout, or server-sent events. HTTP and sockets are
left out. No model, no GPU. With `--replicas` the gateway of a fleet takes them from real links.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import uvloop

from tlt_server.bench.record import finish, steps, wide_console
from tlt_server.bench.tables import FRONTEND, show
from tlt_server.demo.workload import TARGET
from tlt_server.frontend.dialects.replies.whole import EndedItems, phrase
from tlt_server.frontend.generation.delivery import event_frame
from tlt_server.frontend.generation.generation import Generations, Keep
from tlt_server.frontend.generation.items import Items, TokenEvent
from tlt_server.frontend.generation.requests import RequestBatch, RequestItem
from tlt_server.frontend.generation.text import Text
from tlt_server.frontend.http.logs import write_logs
from tlt_server.frontend.http.slices import json_slices
from tlt_server.frontend.link.admission import Admission
from tlt_server.frontend.link.client import EngineClient
from tlt_server.frontend.rollouts.journal import Grown, Journal, frame
from tlt_server.metrics import Metrics
from tlt_server.wire.commands import Command
from tlt_server.wire.events import EngineInfo, Ready, decode_event, of_step
from tlt_server.wire.fingerprint import Fingerprint
from tlt_server.wire.records import (
    OFF,
    Cycle,
    GenerateRequest,
    Sampling,
    StepContext,
    StepOutput,
    encode,
)

SEQUENCES, TOKENS, VOCAB = 128, 512, 500  # a run; tokens of each; ids are below the last
PLAN = {"batch": (1, 64), "whole": (1, 4, 16, 64, 128), "journal": (1, 64), "streamed": (1, 8, 64)}
GAUGES = ("running", "waiting", "pages_free", "pages_cached", "preemptions", "cached_tokens")
INFO = EngineInfo(
    model="simulated",
    weight_version="v0",
    vocab_size=VOCAB,
    max_model_len=2 * TOKENS,
    eos_token_ids=[],
    pages=2**16,
    page_size=16,
    max_running=SEQUENCES,
    drafter="",
    policy="off",
    numerics="strict",
    fingerprint=Fingerprint(1, "float32", "none", "strict 1"),
    attention="none",
    dtype="float32",
    device="cpu",
    threads=1,
    prepared="all strategies",
    phases={},
)


class _Engine:
    """Takes every command."""

    def send(self, command: Command) -> bool:
        return True


def run(args: argparse.Namespace) -> int:
    console, rounds, text = wide_console(), args.rounds, Text.load(TARGET)
    write_logs("warning", None)
    rows: list[dict[str, Any]] = []
    with TemporaryDirectory() as directory, steps(console, sum(map(len, PLAN.values()))) as begin:
        for way, sizes in PLAN.items():
            for size in sizes:
                begin(f"{way}, {size} tokens per output")
                file = Path(directory, "journal")
                spent_s = statistics.median(_spent_s(way, size, text, file) for _ in range(rounds))
                rate = round(SEQUENCES * TOKENS / spent_s)
                first = next((row["tokens_per_cpu_s"] for row in rows if row["way"] == way), rate)
                over = round(rate / first, 2)
                rows.append(
                    {"way": way, "tokens": size, "tokens_per_cpu_s": rate, "over_single": over}
                )
    show(console, "tlt bench frontend", FRONTEND, rows)
    figures = {
        "bench": "frontend",
        "sequences": SEQUENCES,
        "tokens_each": TOKENS,
        "rounds": rounds,
        "rows": rows,
    }
    finish(args, figures, on_gpu=False)
    return 0


def _spent_s(way: str, size: int, text: Text, file: Path) -> float:
    """Return the processor time of one run."""
    events = [*_events(size)]
    file.unlink(missing_ok=True)
    keep: Keep | None = None
    if way == "journal":
        journal = Journal(file)
        keep = lambda outputs: journal.append(frame(Grown(outputs)))  # noqa: E731
    return uvloop.run(_deliver(way, events, text, keep))


def _events(size: int) -> Iterator[tuple[bytes, int]]:
    """Yield what an engine sends, step by step, if each output of a sequence has `size` tokens;
    each event with the tokens that every sequence has after it.
    """
    draw = random.Random(size)
    context = StepContext(SEQUENCES, 0, 512.0, 0)
    cycle = Cycle(
        context=context,
        strategy=OFF,
        rows=SEQUENCES,
        emitted=SEQUENCES,
        accepted=(0,) * SEQUENCES,
        drafted=0,
        step_s=0.01,
    )
    gauges = dict.fromkeys(GAUGES, 1.0)
    for step in range(1, TOKENS + 1):
        due = range(SEQUENCES if step % size == 0 else 0)
        outputs = [_output(i, size, step, draw) for i in due]
        for event in of_step(outputs, gauges, cycle, gaps=[(0.01, 1, SEQUENCES)]):
            yield encode(event), step // size * size


def _output(number: int, tokens: int, step: int, draw: random.Random) -> StepOutput:
    return StepOutput(
        id=f"b-{number}.0",
        token_ids=draw.choices(range(VOCAB), k=tokens),
        logprobs=[-draw.random() for _ in range(tokens)],
        weight_version="v0",
        steps=tokens,
        finish_reason="length" if step == TOKENS else None,
    )


async def _deliver(
    way: str, events: list[tuple[bytes, int]], text: Text, keep: Keep | None
) -> float:
    admission = Admission(max_queue=2**20, max_queue_tokens=2**40, max_page_forecast=1e9)
    metrics = Metrics()
    engine = EngineClient(admission, metrics)
    engine.replica.connect(_Engine())
    engine.take(Ready(INFO))
    generations = Generations(engine, text, metrics)
    sampling = Sampling(max_tokens=TOKENS)
    requests = [
        GenerateRequest(id=f"b-{i}.0", token_ids=[1] * 128, sampling=sampling, seed=i)
        for i in range(SEQUENCES)
    ]
    items = [RequestItem(f"item {i}", [request]) for i, request in enumerate(requests)]
    deadline_s = time.monotonic() + 1e4
    streamed = way == "streamed"
    made = [
        generations.items(RequestBatch(few, streamed, deadline_s))
        for few in ([items] if way == "batch" else [[item] for item in items])
    ]
    last = made[-1][requests[-1].id]  # outputs are taken in order

    gc.collect()
    began_s = time.process_time()
    replying = [
        asyncio.create_task(reply(generations, each, deadline_s, keep, streamed=streamed))
        for each in made
    ]
    await asyncio.sleep(0)
    for event, tokens in events:
        engine.take(decode_event(event))
        while len(last.token_ids) < tokens:  # noqa: ASYNC110 (a step takes longer than its outputs)
            await asyncio.sleep(0)
    size = sum(await asyncio.gather(*replying))
    spent_s = time.process_time() - began_s
    assert size > 4 * SEQUENCES * TOKENS, f"{size} bytes of reply"
    return spent_s


async def reply(
    generations: Generations,
    made: Items,
    deadline_s: float,
    keep: Keep | None = None,
    *,
    streamed: bool = False,
) -> int:
    """Generate items as a client's request does; return the bytes of the reply."""
    ended, size = EndedItems(), 0
    with closing(generations.submit(made, deadline_s, "", keep)) as generation:
        async for event in generation.events():
            if streamed:
                name, data = phrase(event)
                size += len(event_frame(data, name))
            elif not isinstance(event, TokenEvent):
                ended.take(event)
    return size + sum(map(len, json_slices({"results": [*ended.by_id.values()]})))
