"""`tlt bench decode`: plain steps by batch, and with `--against fast` the cost of a fixed order
of addition, with `--against none` the gain of FP8.

Random prompts of 128 tokens, or `--prompt`, and 512 tokens more. `--context` adds one request after
a long prompt, `--prefill` the rate at which the engine reads prompts, which is timed also where
engines are compared. The price is this engine's time over the other's, less one. The drafter that
is loaded keeps its KV in every plain step, as in a server; `--drafter none` leaves it out.
`--shape` times a target of a large model's sizes without a checkpoint and, unless one is named,
without a drafter: weights are random, and none are read or written.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from tlt_server.bench.flags import STORED, field_of
from tlt_server.bench.padding.shapes import SHAPES, write_config
from tlt_server.bench.record import finish, wide_console
from tlt_server.bench.settings import heading, quantization_of, settings_of
from tlt_server.bench.steps import Row, StepCase, longest, measure
from tlt_server.bench.tables import DECODE, show
from tlt_server.engine.settings import EngineSettings
from tlt_server.errors import StartupError
from tlt_server.models.loader import empty_target
from tlt_server.models.numerics import Numerics
from tlt_server.models.shards import stored_bytes
from tlt_server.process.machine import host_memory

PREFILLS = ((1, 4096), (8, 2048))  # prompts at once, tokens of each
QUICK_PREFILLS = ((1, 512), (4, 256))
OF_ENGINE = {"numerics": "{numerics}", "weights": "{quantization}"}
PREFILL_COLUMNS = {**OF_ENGINE, "tokens": "{prompts} x {length}", "tokens/s": "{tokens_per_s:.0f}"}
PRICE_COLUMNS = {
    "against": "{against}",
    "of": "{what}",
    "batch": "{batch}",
    "prompt": "{prompt}",
    "tokens": "{prompts} x {length}",
    "more time": "{percent:+.1f} %",
}


def run(args: argparse.Namespace) -> int:
    """Print a table and one line of JSON."""
    if "fast" in args.against and args.device == "cpu":
        raise StartupError(
            "--against fast needs --device cuda: a CPU's matrix library keeps the mode it was "
            "loaded with; `tlt bench rollout --against fast` compares both on a CPU, in two "
            "processes"
        )
    with TemporaryDirectory() as folder:
        return _run(args, target_of(args, Path(folder)))


def target_of(args: argparse.Namespace, folder: Path) -> EngineSettings:
    """Return the settings of the flags. For a shape, `folder` gets the config.json of the
    target.
    """
    settings = settings_of(args)
    if args.shape is None:
        return settings
    if args.model:
        raise StartupError(
            f"--shape is {args.shape} and --model is {args.model}; a shape has random weights: "
            "leave one of the two out"
        )
    write_config(folder, SHAPES[args.shape], str(settings.dtype))
    if args.device == "cpu":
        _check_memory(args.shape, folder)
    return replace(settings, model=folder, drafter=args.drafter or "none", random_weights=True)


def _check_memory(shape: str, folder: Path) -> None:
    """Raise `StartupError` if a CPU's memory is too small for the weights; a GPU's is checked as
    for a server.
    """
    with torch.device("meta"):
        model = empty_target(folder, numerics=Numerics("strict"))
    need, total = stored_bytes(model.parameters()), host_memory().total
    if need > total:
        raise StartupError(
            f"--shape {shape} has {need / 2**30:.1f} GiB of float32 weights, and this machine "
            f"{total / 2**30:.1f} GiB of memory; use a smaller shape, or --device cuda"
        )


def _run(args: argparse.Namespace, settings: EngineSettings) -> int:
    batches = args.batch or args.batches[args.quick]
    base = replace(
        settings,
        policy="off",
        max_running=max(batches),
        max_rows=args.max_rows or (4096 if args.device == "cuda" else 512),
    )
    base = replace(base, max_model_len=longest(base.model, max(args.context or 0, args.prompt)))
    cases = [StepCase(batch, prompt=args.prompt) for batch in batches]
    cases += [StepCase(1, prompt=args.context)] if args.context else []
    sizes = QUICK_PREFILLS if args.quick else PREFILLS
    kinds = [(kind_of(each), each) for each in (base, *(against(base, n) for n in args.against))]
    rows, prefill = measure(args, kinds, cases, sizes if args.prefill or args.against else ())
    figures = heading(args, "decode", base)
    figures |= {"prompt": args.prompt, "rows": rows, "prefill": prefill}
    console = wide_console()
    show(console, "tlt bench decode: plain steps, medians", OF_ENGINE | DECODE, rows)
    if prefill:
        show(console, "prompts read by the engine", PREFILL_COLUMNS, prefill)
    if args.against:
        figures["price"] = [
            {"against": name, **price}
            for place, name in enumerate(args.against, 1)
            for price in prices(*(parts(each, len(kinds), place) for each in (rows, prefill)))
        ]
        show(console, "price", PRICE_COLUMNS, figures["price"])
    finish(args, figures)
    return 0


def kind_of(settings: EngineSettings) -> Row:
    quantization = quantization_of(settings.model, settings.quantization)
    return {"numerics": settings.numerics, "quantization": quantization}


def against(settings: EngineSettings, name: str) -> EngineSettings:
    """Return the settings of the engine that is compared with: in fast numerics, or without FP8."""
    none: dict[str, Any] = dict.fromkeys(map(field_of, STORED)) | {"quantization": "none"}
    return replace(settings, **({"numerics": "fast"} if name == "fast" else none))


def parts(rows: list[Row], kinds: int, place: int) -> list[tuple[Row, Row]]:
    """Return the rows of the first kind of engine, each with that of the kind at this place."""
    count = len(rows) // kinds
    return list(zip(rows[:count], rows[place * count : (place + 1) * count], strict=True))


def prices(steps: list[tuple[Row, Row]], prefill: list[tuple[Row, Row]]) -> list[Row]:
    """Return the increase in time of one kind of engine over the other, in percent; for prefill
    also the ratio of throughputs.
    """
    found = [
        {
            "what": "decode",
            "batch": mine["batch"],
            "prompt": mine["prompt"],
            "percent": round(100 * (mine["step_ms"] / theirs["step_ms"] - 1), 2),
        }
        for mine, theirs in steps
    ]
    for mine, theirs in prefill:
        ratio = mine["tokens_per_s"] / theirs["tokens_per_s"]
        found.append(
            {
                "what": "prefill",
                "prompts": mine["prompts"],
                "length": mine["length"],
                "percent": round(100 * (1 / ratio - 1), 2),
                "ratio": round(ratio, 4),
            }
        )
    return found
