"""The seam between the loop and a device's runner."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from tlt_server.engine.schedule.batch import Batch
from tlt_server.engine.schedule.sequence import Emission
from tlt_server.speculation.knowledge import Drafted
from tlt_server.wire.records import Cycle, Strategy

NOT_FINITE = (
    "the model gave logits without a finite maximum for this request (NaN or overflow); check the "
    "weights that were loaded"
)


class Finished(NamedTuple):
    batch: Batch
    emissions: list[Emission]
    cycle: Cycle
    drafted: Drafted | None = None  # the trees of this step, if they are known


class Runner(Protocol):
    """Computes batches in order. A runner that works ahead may keep its newest result while
    `busy`.
    """

    learns: bool  # drafters learn from what is accepted

    @property
    def in_flight(self) -> int:
        """Launched batches whose result was not collected."""

    def launch(self, batch: Batch, strategy: Strategy) -> None: ...

    def collect(self, *, busy: bool) -> Finished | None: ...

    def gauges(self) -> Mapping[str, float]: ...
