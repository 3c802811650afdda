"""The seam between the CPU engine and its drafters: their inputs and their operations.

`engine/cpu/device.py` makes the drafters and installs pushed weights; `engine/runner.py` asks them
for candidates. No torch, so that a drafter without a network needs none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self

from tlt_server.speculation.batch import Candidates, DraftBatch
from tlt_server.speculation.calibration import OnlineTable
from tlt_server.wire.records import Strategy


class DraftWeights(NamedTuple):
    """The weights from `--drafter` or from a push."""

    network: Any
    calibration: Any


class Sleeper(Protocol):
    """Memory that a sleep releases: `attention.rows.KVCache`."""

    def free(self) -> None: ...

    def reclaim(self) -> None: ...


@dataclass(frozen=True)
class DraftSetup:
    """The parts that the engine gives a drafter at start."""

    name: str  # in `DRAFTERS`, of its tables and gauges
    target_cache: Any  # `attention.rows.KVCache`
    weights: DraftWeights | None  # None where `--drafter` names no directory
    max_requests: int
    max_rows: int  # draft rows of one proposal: all requests, all depths


class CpuDrafter(Protocol):
    @classmethod
    def make(cls, setup: DraftSetup) -> Self: ...

    @property
    def caches(self) -> Sequence[Sleeper]:
        """Return the drafter's KV, which sleeps and wakes with the target's."""

    @property
    def tables(self) -> Mapping[str, OnlineTable]:
        """Return its tables of acceptance probabilities, by name. The objects never change."""

    def install(self, weights: DraftWeights | None) -> None:
        """Switch to new weights of the target, of the drafter (`weights`), or of both. `knowledge`
        handles their statistics.
        """

    def propose(self, batch: DraftBatch, strategy: Strategy) -> Candidates:
        """Return candidate trees. Depth is limited by `strategy.depth` and `max_depth_B`, children
        per node by `strategy.width`.
        """

    def observe(self, batch: DraftBatch, candidates: Candidates, accepted_N: object) -> None:
        """Learn which candidates were accepted (int8 per node: -1 not verified, 0 rejected or
        unreached, 1 accepted).
        """

    def finish(
        self, request_id: str, group_id: str, tokens: object, prompt_len: int, salt: str = ""
    ) -> None:
        """End a request. Its tokens may serve its siblings with the same salt; its state may be
        freed.
        """

    def forget(self) -> None:
        """Drop the text of ended requests."""

    def gauges(self) -> Mapping[str, float]: ...
