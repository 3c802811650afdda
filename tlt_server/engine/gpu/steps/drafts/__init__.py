"""Drafters on a GPU: one file each, named in `speculation.drafters.DRAFTERS`. They fill a table of
candidate nodes and never wait for the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tlt_kernels.gpu.tensors import KeptRows, Nodes, RowTable, Trees
from tlt_server.attention.gpu import GpuAttention
from tlt_server.attention.rows import KVCache
from tlt_server.engine.gpu.steps.drafts.tables import DeviceTable
from tlt_server.engine.gpu.steps.state import DeviceState
from tlt_server.models import Forward
from tlt_server.speculation.drafters import DRAFTERS
from tlt_server.weights.parts import Drafter
from tlt_server.wire.records import DraftLimits


class DraftKey(NamedTuple):
    """Static shapes of a draft pass."""

    drafter: str
    batch: int
    depth: int
    width: int


def index_of(drafter: str) -> int:
    """Return the drafter's bit in `BatchSlots.drafters_Q`."""
    return list(DRAFTERS).index(drafter)


def drafters_of(limits: DraftLimits | None) -> int:
    """Return the bits of the drafters that may draft for a request."""
    if limits is None:
        return 0
    return sum(1 << i for i, name in enumerate(DRAFTERS) if limits.permits(name))


class DraftPass(Protocol):
    """The pass of one key, with its buffers; captured."""

    key: DraftKey
    nodes: Nodes
    own_columns: int  # the drafter's own nodes; branches stand after them

    def run(self) -> None: ...


@dataclass(frozen=True)
class NetworkStorage:
    """Device memory of a drafter's network, if it has one."""

    name: str  # in `DRAFTERS`, of its tables
    drafter: Drafter
    cache: KVCache
    attention: GpuAttention
    # The hint after each page's last position, for sequences that find the page by its prefix.
    page_hint_PH: Tensor
    held: bool  # what its table learns is activated by `DeviceTable.renew` alone


class RowReader(Protocol):
    def read_rows(self, rows: RowTable, kept: KeptRows, forwarded: Forward) -> None:
        """Read the rows that the target has computed; part of every extend pass."""


class GpuDrafter(RowReader, Protocol):
    network: Any  # the one that a push exchanges; None where it drafts without one

    @classmethod
    def make(cls, state: DeviceState, storage: NetworkStorage | None) -> Self: ...

    def tables(self, stream: torch.cuda.Stream | None) -> Mapping[str, DeviceTable]:
        """Return its tables of acceptance probabilities, by name. `stream`: of the passes."""

    def install(self, changed: Drafter) -> None:
        """Draft with another network's values from the next step on, and with that network's table,
        without observations.
        """

    def begin_again(self, edge_G: NDArray[np.float32], acceptance_K: NDArray[np.float32]) -> None:
        """Start with a new table for its network, without observations."""

    def draft_pass(self, key: DraftKey) -> DraftPass: ...

    def observe(
        self, trees: Trees, kept: KeptRows, nodes: Nodes, rows: RowTable, decode_rows: int
    ) -> None:
        """Learn which nodes were accepted."""

    def gauges(self) -> Mapping[str, float]:
        """Return figures of the recent past, without waiting for the device."""
