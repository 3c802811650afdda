"""Flags of the benches: how a line of a table becomes an argument, the types of their values, and
those that several benches share. Light, because `tlt --help` imports it.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tlt_server.errors import StartupError
from tlt_server.settings.server import SPLITS

if TYPE_CHECKING:
    from tlt_server.wire.commands import SetPolicy

MAX = 2**20  # tokens, rows, threads
MAX_BATCH = 4096  # requests at once
OBJECTIVES = ("ttft", "tpot", "e2el")  # in ms


def whole(text: str, smallest: int, largest: int) -> int:
    if not text.isascii() or not text.isdigit() or not smallest <= int(text) <= largest:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a whole number from {smallest} to {largest}"
        )
    return int(text)


def count(text: str) -> int:
    return whole(text, 1, MAX)


def seed(text: str) -> int:
    return whole(text, 0, 2**31)


def counts(text: str) -> tuple[int, ...]:
    return tuple(count(part) for part in text.split(","))


def batches(text: str) -> tuple[int, ...]:
    return tuple(whole(part, 1, MAX_BATCH) for part in text.split(","))


def leaves(text: str) -> tuple[int, ...]:
    if unknown := [leaves for leaves in counts(text) if leaves not in SPLITS]:
        raise argparse.ArgumentTypeError(f"the number of leaves is {unknown[0]}; use 1, 2, 4 or 8")
    return counts(text)


def workload(text: str) -> str:
    if not re.fullmatch(r"(full )?[1-9][0-9]{0,3}", text):
        raise argparse.ArgumentTypeError(
            f'{text!r} is not a workload: name a number of requests, such as 64, or "full 64"'
        )
    return text


def rate(text: str) -> float:
    """Return requests per second, 0 for `inf`."""
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0.001 <= rate <= 1e5 and rate != math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} must be a rate from 0.001 to 100000, or inf")
    return 0.0 if rate == math.inf else rate


def objectives(text: str) -> dict[str, int]:
    pairs = [part.partition(":") for part in text.split(",")]
    for name, _, _ in pairs:
        if name not in OBJECTIVES:
            raise argparse.ArgumentTypeError(f"{name!r} must be one of {', '.join(OBJECTIVES)}")
    return {name: count(limit_ms) for name, _, limit_ms in pairs}


def policy(text: str) -> SetPolicy:
    from tlt_server.bench.replaying.names import parse_policy

    try:
        return parse_policy(text)
    except StartupError as error:
        raise argparse.ArgumentTypeError(error.message) from error


def writable_file(text: str) -> Path:
    """Refuse an unwritable path before any measurement, so that no figures are lost."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(
            f"{text!r} cannot be written; name a file in a directory that exists"
        )
    return path


# The type of a value by the word that stands for it in a usage.
TYPES: dict[str, Callable[[str], Any]] = {
    "N": count,
    "TOKENS": count,
    "ROWS": count,
    "SEED": seed,
    "SEED,...": lambda text: tuple(seed(part) for part in text.split(",")),
    "BATCH,...": batches,
    "RANK,...": batches,
    "ROWS,...": counts,
    "LEAVES,...": leaves,
    "WIDTH,...": lambda text: tuple(sorted({whole(part, 1, 8) for part in text.split(",")})),
    "COUNT": lambda text: whole(text, 1, MAX_BATCH),
    "INT": int,
    "GIB": float,
    "RATE": rate,
    "NAME:MS,...": objectives,
    "POLICY": policy,
    "SIZE": workload,
    "DIR": Path,
    "INPUT": Path,
    "FILE": writable_file,
}


class Flag(NamedTuple):
    name: str
    how: dict[str, Any]  # keywords of `add_argument`


def flag(usage: str, help: str, default: Any = None, **how: Any) -> Flag:
    """Return a flag in the form of its usage: `--quick` is a switch, `--seed SEED` takes a value of
    this type, `--device cpu|cuda` one of these. The help names the default.
    """
    name, _, value = usage.partition(" ")
    if "|" in value:
        how["choices"] = [int(one) if one.isdigit() else one for one in value.split("|")]
        how["type"] = type(how["choices"][0])
    elif value:
        how = {"type": TYPES.get(value, str)} | how
        if "choices" not in how:
            how["metavar"] = value
    else:
        how["action"] = "store_true"
    if default is not None:
        how["default"] = default
    if default not in (None, {}) and "[" not in help:
        help = f"{help} [default {default}]"
    return Flag(name, {**how, "help": help})


def policies(help: str) -> Flag:
    return flag("--policy POLICY", help, action="append")


def batch(full: str, quick: str) -> Flag:
    help = f"requests at once [default {full}; with --quick {quick}]"
    return flag("--batch BATCH,...", help)


def add_flags(parser: argparse.ArgumentParser, flags: tuple[Flag, ...]) -> None:
    for name, how in flags:
        parser.add_argument(name, **how)


JSON = (
    flag("--json FILE", "also write the figures, with machine, versions and commit, as JSON"),
    flag("--commit NAME", "commit of the code that runs [default: what git says]"),
)
PAIR = (
    flag("--quick", "fewer and shorter responses"),
    flag("--model DIR", "target model [directory; default the shipped pair's]"),
    flag("--drafter NAME", "drafter [directory | history | none; default the shipped pair's]"),
    flag("--threads N", "compute threads [default: processors this process may use]"),
    flag("--seed SEED", "seed of the first response", 0),
    *JSON,
)
NUMERICS = flag(
    "--numerics strict|fast",
    "how matmuls add; exact then reports the rate of differing tokens",
    "strict",
)
STORED = (
    flag("--quantization none|fp8", "of the target's weights [default the checkpoint's]"),
    flag(
        "--kv-cache-dtype fp8_e4m3",
        "type of the target's KV [default that of its weights]",
        choices=["fp8_e4m3"],
    ),
    flag("--drafter-quantization none|fp8", "of the drafter's weights [default none]"),
)
ENGINE = (
    *PAIR,
    flag("--device cpu|cuda", "what computes", "cpu"),
    flag(
        "--dtype float32|bfloat16",
        "dtype of weights and KV [default float32 on a CPU, bfloat16 on a GPU]",
    ),
    *STORED,
    NUMERICS,
)
SPLIT = "|".join(map(str, SPLITS))


def ranks(tells: str = "ranks that share the target") -> tuple[Flag, ...]:
    return (
        flag(f"--tensor-parallel {SPLIT}", tells, 1),
        flag(
            f"--reduction-leaves {SPLIT}",
            "slices of each long sum [default the device's, for those ranks]",
        ),
        flag(
            "--exchange auto|nvlink|nccl",
            "how GPUs exchange sums [default nvlink where they can]",
            "auto",
        ),
        flag(
            "--drafter-parallel auto|shared|replicated",
            "whether GPUs share the drafter [default where that is faster]",
            "auto",
        ),
    )


def field_of(flag: Flag) -> str:
    """Return the name of a flag's setting."""
    return flag.name[2:].replace("-", "_")


# Settings of the engine under the same name, with the same default.
SETTINGS = tuple(map(field_of, (*STORED, NUMERICS, *ranks())))
