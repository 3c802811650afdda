"""Devices that an engine computes on: one file and one table line each, under the names of
`torch.device`.

`choice.py` chooses the device and its options. `assembly.py` builds every engine in the same order:
`compile`, `load`, `allocate`, `equip`. From `load` on, each returns the object that the next one
takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from tlt_kernels.cpu.compiled import cache_directory, compile_all
from tlt_server.engine.phases import OnProgress
from tlt_server.engine.policy_changes import Preparation
from tlt_server.engine.ranks.orders import RankOrders
from tlt_server.engine.record.hidden_states import StateSource
from tlt_server.engine.record.traces import HeldTable
from tlt_server.engine.runner import Runner
from tlt_server.engine.schedule.scheduler import unpadded
from tlt_server.engine.schedule.sequence import Sequence
from tlt_server.engine.settings import DecidedSettings
from tlt_server.models.config import ModelConfig
from tlt_server.registry import Registry
from tlt_server.speculation.calibration import TableRecord
from tlt_server.speculation.learnt import Learnt
from tlt_server.speculation.sizes import Reach, Recordings, Sizes
from tlt_server.weights.parts import Changed, Live
from tlt_server.weights.storage import Free
from tlt_server.wire.fingerprint import Fingerprint

DEVICES = Registry(
    "device",
    {
        "cpu": "tlt_server.engine.cpu.device:CpuDevice",
        "cuda": "tlt_server.engine.gpu.device:CudaDevice",
        "interpreter": "tlt_server.engine.gpu.device:Interpreted",
    },
)


COMPILING, CAPTURING = "compile kernels", "capture graphs"  # parts of phases, with steps
# Whether the whole device may be waited for: no kernel on it waits for another process.
Quiet = Callable[[], bool]


class AcceptanceTable(Learnt[TableRecord], HeldTable, Protocol):
    """Acceptance probabilities of one drafter's nodes."""


class Equipment(Protocol):
    """The runner, and a device's work between steps. A device overrides the methods it needs."""

    runner: Runner
    ranks: RankOrders
    tables: Mapping[str, AcceptanceTable]  # by drafter; `knowledge` holds what they learn
    detail: str = ""  # for the start-up report
    matmuls: str = ""  # the kernel that computes matmuls on a GPU, and why not the other

    def install(self, live: Live, changed: Changed) -> None:
        """Activate committed weights, between two steps."""

    def free(self) -> None:
        """Free the pages' memory, and graphs captured over it or over the weights."""

    def reclaim(self) -> None:
        """Allocate the pages' memory again, empty. If there is too little, raise
        `torch.OutOfMemoryError` and change nothing.
        """

    def forget(self) -> None:
        """Drop the text of ended requests."""

    def on_end(self, sequence: Sequence) -> None:
        """Note that a sequence has ended."""

    def room(self, decoding: int, max_rows: int) -> int:
        """Return the prompt rows that fit in a step with these decoding sequences."""
        return unpadded(decoding, max_rows)

    def record(self, reach: Reach) -> bool:
        """Capture one step that the policy may need, while none runs. Return False if none is
        left.
        """
        return False

    def prepare(self, reach: Reach) -> Preparation | None:
        """Return the preparation of a policy's launches; None if they are prepared."""
        return None

    def prepared(self, reach: Reach) -> str:
        """Report the preparation for the first steps under a policy."""
        return "all of its kernels are compiled"


@dataclass(frozen=True)
class Memory:
    """KV pages and their operations."""

    pages: int
    on_reuse: Callable[[Iterable[int]], None]
    save: Callable[[list[int]], object]
    restore: Callable[[Any, list[int]], None]
    kv: object  # the tensors: the device's own, which `equip` takes
    states: StateSource | None = None  # None: the states of sequences are not kept
    detail: str = ""  # for the start-up report


class RunnerSetup(NamedTuple):
    """The parts that a device makes the runner and its drafters of."""

    live: Live
    memory: Memory
    reach: Reach  # the strategies that the policy may choose
    page_table_SP: NDArray[np.int32]
    on_progress: OnProgress
    quiet: Quiet


def make_device(settings: DecidedSettings) -> Device:
    """Create the device that the settings name."""
    device: Device = DEVICES.resolve(settings.device)(settings)
    return device


def compiled(modules: tuple[str, ...], on_progress: OnProgress) -> str:
    """Compile or load the CPU kernels of these modules, and describe the result."""
    new = compile_all(modules, partial(on_progress, COMPILING))
    return f"{new} compiled, once per machine, into {cache_directory()}" if new else "from cache"


class Device(Protocol):
    name: str  # for `/server_info`
    warms_up: bool  # a first rollout takes what no request should wait for
    device: torch.device
    sizes: Sizes  # the sizes that steps are padded to
    recordings: Recordings | None  # None: a device that records nothing

    @property
    def numerics(self) -> str:
        """The guarantee on tokens, and how it is kept."""

    @property
    def fingerprint(self) -> Fingerprint:
        """Everything that bits depend on; known once the weights are loaded."""

    def compile(self, on_progress: OnProgress) -> str:
        """Compile or load the host's kernels, and describe the result."""

    def load(self, config: ModelConfig) -> Live:
        """Load and verify target and drafter."""

    def allocate(self, live: Live, max_model_len: int) -> Memory:
        """Allocate the requested KV pages, or as many as fit."""

    def equip(self, setup: RunnerSetup) -> Equipment:
        """Return the runner with its drafters, and graphs of all strategies that the policy may
        choose.
        """

    def free(self) -> Free:
        """Return the memory available to a staged version."""
