"""`tlt bench decode`: plain steps by batch, and with `--against fast` the cost of a fixed order
of addition.

Random prompts of 128 tokens and 512 tokens more. `--context` adds one request after a long prompt,
`--prefill` the rate at which the engine reads prompts, which is timed also where numerics are
compared. The price of strict is its time over the time of fast, less one. The drafter that is
loaded keeps its KV in every plain step, as in a server; `--drafter none` leaves it out. `--shape`
times a target of a large model's sizes without a checkpoint and, unless one is named, without a
drafter: weights are random, and none are read or written.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from tlt_server.bench.padding.shapes import SHAPES, write_config
from tlt_server.bench.record import finish, wide_console
from tlt_server.bench.settings import heading, settings_of
from tlt_server.bench.steps import PROMPT, Row, StepCase, longest, measure
from tlt_server.bench.tables import DECODE, show
from tlt_server.engine.settings import EngineSettings
from tlt_server.errors import StartupError
from tlt_server.models.loader import empty_target
from tlt_server.models.numerics import Numerics
from tlt_server.models.shards import stored_bytes
from tlt_server.process.machine import host_memory

PREFILLS = ((1, 4096), (8, 2048))  # prompts at once, tokens of each
QUICK_PREFILLS = ((1, 512), (4, 256))
BY_NUMERICS = {"numerics": "{numerics}", **DECODE}
PREFILL_COLUMNS = {
    "numerics": "{numerics}",
    "tokens": "{prompts} x {length}",
    "tokens/s": "{tokens_per_s:.0f}",
}
PRICE_COLUMNS = {
    "of": "{what}",
    "batch": "{batch}",
    "prompt": "{prompt}",
    "tokens": "{prompts} x {length}",
    "more time": "{percent:+.1f} %",
}


def run(args: argparse.Namespace) -> int:
    """Print a table and one line of JSON."""
    if args.against and args.device == "cpu":
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
    base = replace(base, max_model_len=longest(base.model, args.context))
    cases = [StepCase(batch) for batch in batches]
    cases += [StepCase(1, prompt=args.context)] if args.context else []
    sizes = QUICK_PREFILLS if args.quick else PREFILLS
    names = [base.numerics, *([args.against] if args.against else [])]
    kinds = [({"numerics": name}, replace(base, numerics=name)) for name in names]
    rows, prefill = measure(args, kinds, cases, sizes if args.prefill or args.against else ())
    figures = heading(args, "decode", base)
    figures |= {"prompt": PROMPT, "rows": rows, "prefill": prefill}
    console = wide_console()
    show(console, "tlt bench decode: plain steps, medians", BY_NUMERICS, rows)
    if prefill:
        show(console, "prompts read by the engine", PREFILL_COLUMNS, prefill)
    if args.against:
        figures["price"] = prices(rows, prefill, base.numerics, args.against)
        show(console, f"price of {base.numerics}", PRICE_COLUMNS, figures["price"])
    finish(args, figures)
    return 0


def prices(rows: list[Row], prefill: list[Row], ours: str, other: str) -> list[Row]:
    """Return the increase in time of one kind of numerics over the other, in percent; for prefill
    also the ratio of throughputs.
    """

    def paired(rows: list[Row]) -> Iterator[tuple[Row, Row]]:
        kinds = ([row for row in rows if row["numerics"] == kind] for kind in (ours, other))
        return zip(*kinds, strict=True)

    found = [
        {
            "what": "decode",
            "batch": mine["batch"],
            "prompt": mine["prompt"],
            "percent": round(100 * (mine["step_ms"] / theirs["step_ms"] - 1), 2),
        }
        for mine, theirs in paired(rows)
    ]
    for mine, theirs in paired(prefill):
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
