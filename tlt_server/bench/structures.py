"""`tlt bench structures`: the time per token of requests with a JSON schema, against requests
without one, plain and speculated on; and the time to compile a schema of 50 fields.

Both kinds take turns on one engine; the median of the rounds' ratios counts. The schema is a list
of records that is longer than the output, so both kinds emit the same number of tokens. The
answer to a random prompt is noise to a drafter, in a schema less so; `per step` compares the times
of steps, however many drafts they accept.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from itertools import product
from pathlib import Path
from typing import Any

import msgspec

from tlt_server.bench.engines import LoadedOnce
from tlt_server.bench.record import finish, steps, wide_console
from tlt_server.bench.settings import heading, own, settings_of
from tlt_server.bench.steps import in_turns, random_requests, ratio
from tlt_server.bench.tables import STRUCTURES, show
from tlt_server.engine.loop import Engine
from tlt_server.engine.start.assembly import assemble
from tlt_server.grammars.compiler import Compiler
from tlt_server.speculation.drafters import networked
from tlt_server.wire.events import EngineInfo
from tlt_server.wire.records import OFF, GenerateRequest, Grammar, Strategy

PROMPT, NEW, QUICK_NEW = 32, 192, 64  # tokens
ROUNDS = 7
FIELDS = 50  # in the schema to compile
STRATEGIES = {
    "cpu": (OFF, Strategy("eagle", 7, 4, 16)),
    "cuda": (OFF, Strategy("eagle", 7, 1, 8), Strategy("eagle", 7, 4, 32)),
}
RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "count": {"type": "integer"},
        "flags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 4},
    },
    "required": ["name", "count", "flags"],
    "additionalProperties": False,
}
SCHEMA = Grammar(
    kind="json_schema", text=json.dumps({"type": "array", "items": RECORD, "minItems": NEW})
)


def run(args: argparse.Namespace) -> int:
    """Print a table and one line of JSON."""
    batches, new = args.batch or args.batches[args.quick], QUICK_NEW if args.quick else NEW
    settings = settings_of(args, 2 * (PROMPT + NEW), policy="off", max_running=max(batches))
    console, rows = wide_console(), list[dict[str, Any]]()
    written = STRATEGIES[args.device] if networked(settings.drafters) else (OFF,)
    strategies = [own(each, settings) for each in written]
    with steps(console, 1 + len(batches) * len(strategies)) as step:
        engine, info = assemble(settings, make_device=LoadedOnce(strategies).device)
        for strategy, batch in product(strategies, batches):
            step(f"{strategy.name}, batch {batch}")
            requests = random_requests(batch, PROMPT, new, seed=args.seed)
            named = {"strategy": strategy.name, "batch": batch}
            rows.append({**named, **compared(engine, requests, strategy)})
    compiled_ms = compile_ms(Path(settings.model), info)
    figures = heading(args, "structures", settings, info.fingerprint)
    figures |= {"prompt": PROMPT, "new": new, "compile_ms": compiled_ms, "rows": rows}
    show(console, "tlt bench structures", STRUCTURES, rows)
    console.print(f"a schema of {FIELDS} fields compiles in {compiled_ms:.1f} ms")
    finish(args, figures)
    return 0


def compile_ms(model: Path, info: EngineInfo) -> float:
    """Return the median time to compile a schema, with the tokenizer loaded."""
    kinds = ("string", "integer", "number", "boolean")
    fields = {f"field_{i}": {"type": kinds[i % len(kinds)]} for i in range(FIELDS)}
    schema = {"type": "object", "properties": fields, "required": [*fields]}
    grammar = Grammar(kind="json_schema", text=json.dumps(schema))
    compiler, times_ms = Compiler(model, info.vocab_size, info.eos_token_ids), []
    compiler.prepare()
    for _ in range(ROUNDS):
        began = time.perf_counter()
        compiler.compile(grammar)
        times_ms.append(1000 * (time.perf_counter() - began))
    return statistics.median(times_ms)


def compared(
    engine: Engine, requests: list[GenerateRequest], strategy: Strategy
) -> dict[str, float]:
    """Return the median times per token, their ratio, and the time of masks per token."""
    asked = {"structured_outputs": SCHEMA, "ignore_eos": False}
    structured = [
        msgspec.structs.replace(r, sampling=msgspec.structs.replace(r.sampling, **asked))
        for r in requests
    ]
    ways = {"plain": requests, "structured": structured}
    in_turns(engine, ways, strategy, 0)  # compiles, so that no mask of it is counted
    before = engine.gauges()["structures_mask_s"]
    found = in_turns(engine, ways, strategy, ROUNDS, settle=1)
    tokens = (ROUNDS + 1) * sum(request.sampling.max_tokens for request in requests)
    plain, mine = found["plain"], found["structured"]
    return {
        "plain_us": statistics.median(1e6 / timed.rate for timed in plain),
        "structured_us": statistics.median(1e6 / timed.rate for timed in mine),
        "ratio": ratio(plain, mine, lambda timed: timed.rate),
        "step_ratio": ratio(mine, plain, lambda timed: timed.step_ms),
        "plain_accept_length": statistics.median(timed.accept_length for timed in plain),
        "structured_accept_length": statistics.median(timed.accept_length for timed in mine),
        "mask_us": 1e6 * (engine.gauges()["structures_mask_s"] - before) / tokens,
    }
