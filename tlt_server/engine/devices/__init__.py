"""Devices that an engine computes on: one file each, one table line each, named as `torch.device`
names them.

`choice.py` says which, and with what. `assembly.py` builds every engine in the same order:
`compile`, `load`, `allocate`, `equip`. Each but the first returns what exists from then on, and the
next takes it.
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
    """Survivals of the nodes of one drafter."""


class Equipment(Protocol):
    """The runner, and a device's work between steps. A device overrides the methods it needs."""

    runner: Runner
    ranks: RankOrders
    tables: Mapping[str, AcceptanceTable]  # by drafter; `knowledge` holds what they learn
    detail: str = ""  # for the start-up report
    matmuls: str = ""  # the kernel that computes matmuls on a GPU, and why not the other

    def install(self, live: Live, changed: Changed) -> None:
        """Let committed weights take over, between two steps."""

    def free(self) -> None:
        """Give back the pages' memory, and all that was recorded over it and over the weights."""

    def reclaim(self) -> None:
        """Reclaim the pages' memory, empty. If there is too little, raise `torch.OutOfMemoryError`
        and change nothing.
        """

    def forget(self) -> None:
        """Drop the text of requests that have ended."""

    def on_end(self, sequence: Sequence) -> None:
        """Take note that a sequence has ended."""

    def room(self, decoding: int, max_rows: int) -> int:
        """Return how many prompt rows a step with these decoding sequences may read."""
        return unpadded(decoding, max_rows)

    def record(self, reach: Reach) -> bool:
        """Record one step that may come under a policy, while none runs; False: there is none to
        record.
        """
        return False

    def prepare(self, reach: Reach) -> Preparation | None:
        """Return the preparation of a policy's launches; None if they are prepared already."""
        return None

    def prepared(self, reach: Reach) -> str:
        """Describe the preparation that the first steps under a policy find."""
        return "all of its kernels are compiled"


@dataclass(frozen=True)
class Memory:
    """KV pages, and the operations on them."""

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
    """Make the device that these settings name."""
    device: Device = DEVICES.resolve(settings.device)(settings)
    return device


def compiled(modules: tuple[str, ...], on_progress: OnProgress) -> str:
    """Make the CPU kernels of these modules ready, and describe what that took."""
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
        """The guarantee that tokens have, with how it is kept."""

    @property
    def fingerprint(self) -> Fingerprint:
        """Everything that bits depend on; known once the weights are loaded."""

    def compile(self, on_progress: OnProgress) -> str:
        """Make the kernels of the host ready, and describe what that took."""

    def load(self, config: ModelConfig) -> Live:
        """Target and drafter as they lie on disk, verified."""

    def allocate(self, live: Live, max_model_len: int) -> Memory:
        """KV pages as asked for, or as many as fit."""

    def equip(self, setup: RunnerSetup) -> Equipment:
        """Return the runner with its drafters, and graphs captured of all that the policy may
        choose.
        """

    def free(self) -> Free:
        """Return the memory that a staged version may take now."""
