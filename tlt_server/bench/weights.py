"""`tlt bench weights`: pushes by every channel of a CPU, against a plain copy of the same bytes on
the same disk.

Two checkpoints: the shipped pair's target, and a random one of `--gib` GiB in float32. Each push
goes into a real server, from the trainers' own halves, and ends when it is live; the copy is read,
written and synced. Rounds are interleaved. As many follow while requests decode, for the pause at
the commit. Only ratios say something on a busy machine.

With `--channel ipc` or `nccl`, `--device cuda` and `--model DIR` instead: pushes from GPU to GPU
(`weights_gpu`). With `--replicas` pushes to a fleet, and a replica that takes weights from another.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from safetensors.torch import load_file

from tlt_client import Client
from tlt_client.channels.broadcast import BroadcastSender
from tlt_client.channels.disk import write
from tlt_client.channels.http import HttpSender
from tlt_client.channels.ipc import IpcSender
from tlt_client.wire import Token
from tlt_server.bench.padding.shapes import Shape, write_config
from tlt_server.bench.record import finish
from tlt_server.bench.settings import asked
from tlt_server.demo.server import ServerProcess
from tlt_server.demo.workload import TARGET
from tlt_server.errors import StartupError
from tlt_server.models.config import ModelConfig

HIDDEN, MLP = 1024, 4096
LENGTH = 256  # tokens of prompt and answer
REQUESTS = 4  # decode meanwhile


def random_checkpoint(directory: Path, gib: float) -> Path:
    """Write a checkpoint of the shipped target's family, wider, and as deep as the size
    requires.
    """
    import torch

    from tlt_server.models.loader import empty_target
    from tlt_server.models.numerics import Numerics

    shutil.copytree(TARGET, directory, ignore=shutil.ignore_patterns("*.safetensors"))
    per_layer = 4 * (2 * HIDDEN * HIDDEN + 2 * HIDDEN * HIDDEN // 4 + 3 * HIDDEN * MLP)
    layers, vocab = max(1, round(gib * 2**30 / per_layer)), ModelConfig.read(TARGET).vocab_size
    shape = Shape("qwen2", HIDDEN, MLP, layers, 16, 4, vocab, 0, 4096, head_dim=HIDDEN // 16)
    write_config(directory, shape, "float32")
    with torch.device("meta"):
        weights = empty_target(directory, numerics=Numerics("fast", threads=1)).parameters()
    scale = math.sqrt(HIDDEN)
    write(((name, torch.randn(view.shape) / scale) for name, view in weights.items()), directory)
    return directory


def copied(files: list[Path], to: Path) -> None:
    for file in files:
        with open(file, "rb") as source, open(to / file.name, "wb") as target:
            shutil.copyfileobj(source, target, 2**24)
            target.flush()
            os.fsync(target.fileno())


class MeasuredPush(NamedTuple):
    seconds: float
    reply: Mapping[str, Any]


def timed(push: Callable[[str], Mapping[str, Any]], version: str) -> MeasuredPush:
    started = time.perf_counter()
    reply = push(version)
    return MeasuredPush(time.perf_counter() - started, reply)


@contextmanager
def decoding(url: str) -> Iterator[None]:
    """Keep requests decoding during the block, each followed immediately by another, with staggered
    ends.
    """
    over, seen = threading.Event(), [0] * REQUESTS

    def keep_one(i: int) -> None:
        with Client(url, timeout_s=600) as client:
            while not over.is_set():
                for event in client.stream(
                    [{"token_ids": [1 + i] * 16, "seed": i}],
                    sampling={"max_tokens": LENGTH - 32 - 16 * i, "ignore_eos": True},
                ):
                    seen[i] += isinstance(event, Token)

    with ThreadPoolExecutor(REQUESTS) as pool:
        running = [pool.submit(keep_one, i) for i in range(REQUESTS)]
        try:
            while not all(seen) and not any(one.done() for one in running):
                time.sleep(0.01)
            yield
        finally:
            over.set()
            while not all(one.done() for one in running):
                httpx.post(f"{url}/abort_requests").raise_for_status()
                time.sleep(0.01)
    for one in running:
        one.result()


def row(
    channel: str,
    size: int,
    copy_s: Sequence[float],
    alone: Sequence[MeasuredPush],
    busy: Sequence[MeasuredPush],
) -> dict[str, Any]:
    """Return one channel's figures: medians of the pushes into an idle server, and the longest
    pause of those into a `busy` one.
    """
    took, copy = statistics.median(push.seconds for push in alone), statistics.median(copy_s)
    phases = {
        phase: statistics.median(push.reply["phases_s"][phase] for push in alone)
        for phase in alone[0].reply["phases_s"]
    }
    return {
        "bytes": size,
        "channel": channel,
        "push_s": round(took, 4),
        "copy_s": round(copy, 4),
        "ratio": round(took / copy, 2),
        "mb_per_s": round(size / took / 1e6, 1),
        "phases_s": {phase: round(phase_s, 4) for phase, phase_s in phases.items()},
        "push_while_decoding_s": round(statistics.median(push.seconds for push in busy), 4),
        "longest_pause_ms": round(max(push.reply["pause_ms"] for push in busy), 3),
    }


def measure(model: Path, room: Path, rounds: int) -> Iterator[dict[str, Any]]:
    files = sorted(model.glob("*.safetensors"))
    one, other = room / "copy", room / "root" / "pushed"
    one.mkdir(parents=True)
    other.mkdir(parents=True)
    copied(files, other)
    for file in model.glob("*.index.json"):
        shutil.copy(file, other)
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    size = sum(tensor.nbytes for tensor in tensors.values())
    flags = (
        *("--model", str(model), "--numerics", "fast"),
        *("--weight-root", str(room / "root"), "--state-dir", str(room / "state")),
        *("--weight-channels", "disk,http,broadcast,ipc", "--kv-memory-mb", "64"),
        *("--max-model-len", str(LENGTH), "--max-running", str(REQUESTS)),
    )
    with ServerProcess(*flags) as server, Client(server.url, timeout_s=600) as client:
        broadcast = BroadcastSender(client)
        pushes: dict[str, Callable[[str], Mapping[str, Any]]] = {
            "disk": lambda version: client.update_weights(other, version),
            "http": lambda version: HttpSender(client).push(tensors.items(), version),
            "gloo": lambda version: broadcast.push(tensors.items(), version),
            "ipc": lambda version: IpcSender(client).push(tensors.items(), version),
        }
        copy_s = list[float]()
        alone, busy = ({name: list[MeasuredPush]() for name in pushes} for _ in range(2))
        for turn in range(rounds):
            started = time.perf_counter()
            copied(files, one)
            copy_s.append(time.perf_counter() - started)
            for name, push in pushes.items():
                alone[name].append(timed(push, f"{name}-{turn}"))
        with decoding(server.url):
            for turn in range(rounds):
                for name, push in pushes.items():
                    busy[name].append(timed(push, f"{name}-busy-{turn}"))
        broadcast.close()
    for name in pushes:
        yield {"checkpoint": model.name, **row(name, size, copy_s, alone[name], busy[name])}


def check(args: argparse.Namespace) -> None:
    """Raise `StartupError` for incompatible flags."""
    if (args.device == "cuda") != bool(args.channel and args.model):
        raise StartupError("--device cuda needs --channel and --model, and they are for it only")
    if args.device == "cpu" and args.state_dir:
        raise StartupError(
            "--state-dir is for --device cuda; "
            "on a CPU every push is spooled next to the checkpoints"
        )
    if args.device == "cpu":
        for flag in asked(args):
            raise StartupError(f"{flag} is for --device cuda: leave it out")


def run(args: argparse.Namespace) -> int:
    check(args)
    if args.device == "cuda":
        from tlt_server.bench.weights_gpu import measure as measured

        finish(args, measured(args), on_gpu=True)
        return 0
    rows = []
    with tempfile.TemporaryDirectory(prefix="tlt-weights-") as name:
        random = [random_checkpoint(Path(name) / "random", args.gib)] if args.gib else []
        for model in (TARGET, *random):
            for found in measure(model, Path(name) / f"room-{model.name}", args.rounds):
                rows.append(found)
                said = ("checkpoint", "channel", "push_s", "ratio", "longest_pause_ms")
                print("  ".join(f"{field} {found[field]}" for field in said), flush=True)
    figures = {"bench": "weights", "rounds": args.rounds, "requests": REQUESTS, "rows": rows}
    finish(args, figures, on_gpu=False)
    return 0
