"""Pushes from a trainer's GPU memory into a serving engine, for `tlt bench weights
--channel ipc|nccl --device cuda`.

By ipc both are on the first GPU, by nccl the engine begins on the second. Requests decode all the
while. A commit falls between a step's end and its tokens' way out, or before the next step; so the
gap at a commit is the longer of the last two before a request's first token of the new version is
there. With a state directory every push is spooled, too; without, nothing is.
"""

from __future__ import annotations

import argparse
import os
import statistics
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx
import torch
from safetensors.torch import load_file

from tlt_client import Client
from tlt_client.channels.broadcast import BroadcastSender
from tlt_client.channels.ipc import IpcSender
from tlt_client.wire import ItemResult, Token
from tlt_server.bench.settings import asked_words, quantization_of, shape_of
from tlt_server.demo.server import ServerProcess

REQUESTS, LENGTH = 8, 16384  # they decode for longer than the pushes take
SETTLE_S = 0.5  # decoding before and after a push
# The other phases last from the first byte until the version is staged.
NOT_STAGING = ("wait", "commit")


class Decoding:
    """Decoding requests, with the arrival times of their tokens."""

    def __init__(self, url: str) -> None:
        self._url, self.times, self.boundaries = url, dict[str, list[float]](), dict[str, int]()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        while len(self.times) < REQUESTS:
            time.sleep(0.01)
        time.sleep(SETTLE_S)

    def _read(self) -> None:
        items = [{"id": f"r{i}", "token_ids": [1 + i] * 16, "seed": i} for i in range(REQUESTS)]
        with Client(self._url, timeout_s=600) as client:
            for event in client.stream(
                items, sampling={"max_tokens": LENGTH - 32, "ignore_eos": True}
            ):
                now = time.perf_counter()
                if isinstance(event, Token):
                    self.times.setdefault(event.id, []).extend([now] * len(event.token_ids))
                elif (
                    isinstance(event, ItemResult)
                    and event.choices
                    and len(event.choices[0].weight_versions) > 1
                ):
                    self.boundaries[event.id] = event.choices[0].weight_versions[1].start

    def end(self) -> None:
        time.sleep(SETTLE_S)
        httpx.post(f"{self._url}/abort_requests").raise_for_status()
        self._thread.join()

    def figures(self, push_started: float) -> dict[str, float]:
        """Return milliseconds; the push started at `push_started`."""
        gaps = [
            [(after - before, after) for before, after in zip(times, times[1:], strict=False)]
            for times in self.times.values()
        ]
        ends = {id: self.times[id][at] for id, at in self.boundaries.items()}
        at_commit = [
            gap for id, at in self.boundaries.items() for gap in last_gaps(self.times[id][: at + 1])
        ]
        staging = [
            gap
            for of in gaps
            for gap, after in of
            if push_started < after < min(ends.values()) - max(at_commit)
        ]
        alone = [gap for of in gaps for gap, after in of if after < push_started]
        return {
            "requests": len(ends),
            "longest_gap_ms": 1e3 * max(at_commit),
            "step_ms": 1e3 * statistics.median(alone),
            "step_while_staging_ms": 1e3 * statistics.median(staging),
            "longest_gap_while_staging_ms": 1e3 * max(staging),
        }


def last_gaps(times: list[float]) -> list[float]:
    """Return the last two gaps between tokens that did not arrive together."""
    apart = sorted(set(times))[-3:]
    return [after - before for before, after in zip(apart, apart[1:], strict=False)]


@contextmanager
def served(args: argparse.Namespace) -> Iterator[str]:
    """Serve on the GPUs that the channel needs; this process uses the first one."""
    torch.cuda.init()
    flags = (
        *("--device", "cuda", "--model", str(args.model), "--weight-channels", "ipc,broadcast"),
        *("--max-running", str(REQUESTS), "--max-model-len", str(LENGTH)),
        *("--kv-memory-mb", "12288", "--weight-staging", "device"),
        *(("--state-dir", str(args.state_dir)) if args.state_dir else ()),
        *asked_words(args),
    )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    before = dict(os.environ)
    if args.channel == "nccl":
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible[1:])
    try:
        with ServerProcess(*flags) as server:
            yield server.url
    finally:
        os.environ.clear()
        os.environ.update(before)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    channel: str = args.channel
    tensors = {
        name: tensor
        for file in sorted(args.model.glob("*.safetensors"))
        for name, tensor in load_file(file, device="cuda:0").items()
    }
    size, rows = sum(tensor.nbytes for tensor in tensors.values()), list[dict[str, float]]()
    with served(args) as url, Client(url, timeout_s=600) as client:
        sender = IpcSender(client) if channel == "ipc" else BroadcastSender(client, backend="nccl")
        for turn in range(args.rounds):
            decoding, push_started = Decoding(url), time.perf_counter()
            reply: Mapping[str, Any] = sender.push(tensors.items(), f"{channel}-{turn}")
            push_s = time.perf_counter() - push_started
            decoding.end()
            staged_s = sum(
                seconds for phase, seconds in reply["phases_s"].items() if phase not in NOT_STAGING
            )
            rows.append(
                {
                    "push_s": push_s,
                    "staged_s": staged_s,
                    "gb_per_s": size / staged_s / 1e9,
                    "pause_ms": reply["pause_ms"],
                    **decoding.figures(push_started),
                    **{f"{phase}_s": seconds for phase, seconds in reply["phases_s"].items()},
                }
            )
        sender.close()
    median = {name: round(statistics.median(row[name] for row in rows), 4) for name in rows[0]}
    row = {
        "channel": channel,
        "bytes": size,
        **median,
        "longest_gap_ms": round(max(row["longest_gap_ms"] for row in rows), 3),
    }
    return {
        "bench": "weights-gpu",
        "shape": shape_of(args.model),
        "tensor_parallel": args.tensor_parallel,
        "quantization": quantization_of(args.model, args.quantization),
        "rounds": args.rounds,
        "spooled": args.state_dir is not None,
        "rows": [row],
    }
