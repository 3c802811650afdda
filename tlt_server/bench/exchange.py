"""`tlt bench exchange`: the time in which two GPUs exchange partial sums, at Qwen2.5-7B's width.

Two processes, one per GPU, map each other's memory by CUDA IPC. Rank 0 reports, each section as
soon as it is there: the time of a signal; the fused exchange with residual and norm inside a CUDA
graph, in each way that bytes may take (`tlt_kernels.gpu.exchange.Way`), against the norm alone on
one GPU; small results gathered; the cost of exchanges between the matmuls of a step, and how long
each GPU waits in them for the other; and NCCL's all-gather inside a graph. A rank that fails or is
silent ends the bench; the sections until then are written.
"""

from __future__ import annotations

import argparse
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from typing import IO, Any

import msgspec

from tlt_kernels.parents import bound
from tlt_server.bench.micro import require_gpu, say
from tlt_server.bench.record import finish
from tlt_server.models.environment import NO_MULTICAST
from tlt_server.process.faults import exit_of

RANKS = 2
RANK = (sys.executable, "-P", "-m", "tlt_server.bench.exchange_rank")
SILENT_S = 180.0  # a section takes seconds, and its kernels' compilation longer


def _read(rank: int, lines: IO[str], told: queue.Queue[tuple[int, str]]) -> None:
    for line in lines:
        told.put((rank, line))
    told.put((rank, ""))


def measured(
    command: Sequence[str] = RANK, *, silent_s: float = SILENT_S
) -> tuple[list[dict[str, Any]], str]:
    """Return the rows of all sections, and why some are missing, or nothing. The command gets a
    folder to meet in, and a rank.
    """
    told: queue.Queue[tuple[int, str]] = queue.Queue()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            subprocess.Popen(
                bound([*command, folder, str(rank)]),
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, **NO_MULTICAST},
            )
            for rank in range(RANKS)
        ]
        try:
            for number, rank in enumerate(ranks):
                assert rank.stdout is not None
                threading.Thread(
                    target=_read, args=(number, rank.stdout, told), daemon=True
                ).start()
            left = RANKS
            while left:
                try:
                    number, line = told.get(timeout=silent_s)
                except queue.Empty:
                    return rows, f"no rank has said anything for {silent_s:g} s"
                if line:
                    rows += _shown(line)
                    continue
                left -= 1
                if status := ranks[number].wait(silent_s):
                    return rows, f"rank {number} {exit_of(status)}; see above"
            return rows, ""
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()


def _shown(line: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = msgspec.json.decode(line)
    for row in rows:
        say(row)
    return rows


def run(args: argparse.Namespace) -> int:
    require_gpu(RANKS)
    rows, missing = measured()
    figures = {"bench": "exchange", "shape": {"hidden": 3584}, "missing": missing, "rows": rows}
    finish(args, figures, on_gpu=True)
    if missing:
        print(f"incomplete: {missing}", file=sys.stderr)
    return 1 if missing else 0
