"""Reads of the live weights, in threads because they are slow: checksums of all tensors, rows of
one tensor, and copies for the trainer. The live storage must not change during a read; later work
on a copy blocks nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch

from tlt_client.channels import DRAFTER_PREFIX
from tlt_server.engine.pushes.reports import WeightReports
from tlt_server.errors import Conflict, InvalidRequest, NotFound, PushFailed, TltError, Unavailable
from tlt_server.models.shards import whole
from tlt_server.process.threads import Crew
from tlt_server.speculation.cost import CostRecord
from tlt_server.weights.handover import hand_over
from tlt_server.weights.versions import Versions
from tlt_server.wire.commands import HandOver, LookAtWeights, ReadWeights

MAX_READERS = 4  # at once, including those that wait for a change to end
MAX_NUMBERS = 2**21  # elements of a tensor, read by one command

Answer = Callable[[], dict[str, Any]]  # the fields of a report, which may take a while, too


class WeightReads:
    def __init__(
        self, versions: Versions, reports: WeightReports, costs: Callable[[], CostRecord | None]
    ) -> None:
        """`costs` returns the time of steps; None if it is unknown."""
        self._versions, self._reports, self._costs = versions, reports, costs
        self._readers = Crew("read weights", MAX_READERS)
        self._waiting: list[str] = []  # ids of commands that came during a change
        self._reading: set[str] = set()  # ids of commands that read the live storage now

    @property
    def busy(self) -> bool:
        """Return True if the live storage is being read."""
        return bool(self._reading)

    @property
    def working(self) -> bool:
        """Return True if a thread has something to report, even after its read."""
        return self._readers.busy

    def look(self, command: LookAtWeights, *, changing: bool) -> None:
        """Answer with the versions and, on request, with checksums computed after any change."""
        if not command.checksums:
            self._reports.report(command.id, "looked")
            return
        self._readers.check_room(len(self._waiting))
        if changing:
            self._waiting.append(command.id)
        else:
            self._sum(command.id)

    def read(self, command: ReadWeights, *, changing: bool) -> None:
        """Answer with the first rows of a live tensor; `Conflict` during a change."""
        tensor = self._readable(command.name, command.rows, changing=changing)
        self._readers.check_room(len(self._waiting))

        def read() -> Answer:
            values = tensor.float().cpu().contiguous().numpy().tobytes()
            return lambda: {"values": values, "shape": list(tensor.shape)}

        self._start(command.id, read)

    def hand_over(self, command: HandOver, *, changing: bool) -> None:
        """Answer with the written versions; `Conflict` during a change."""
        if changing:
            raise Conflict("the active weights are about to change; ask again afterwards")
        if self._versions.quarantined:
            raise Conflict("the active weights are quarantined; push a version first")
        self._readers.check_room(len(self._waiting))
        live, state, costs = self._versions.live, self._reports.state(), self._costs()
        known = msgspec.json.encode(costs) if costs is not None else b""

        def read() -> Answer:
            write = hand_over(live, Path(command.drafter), known)

            def answer() -> dict[str, Any]:
                write(Path(command.directory))
                return {"state": state}  # as it was when the copy was made

            return answer

        self._start(command.id, read)

    def advance(self) -> None:
        """Start the waiting reads; no change may be in progress."""
        waiting, self._waiting = self._waiting, []
        for id in waiting:
            try:
                self._sum(id)
            except Unavailable as error:
                self._reports.refuse(id, error)

    def _sum(self, id: str) -> None:
        live = self._versions.live
        parts = live.only(live.by_role)

        def read() -> Answer:
            sums = live.live_sums()
            return lambda: {"parts": parts, "checksums": sums}

        self._start(id, read)

    def _start(self, id: str, look: Callable[[], Answer]) -> None:
        """Answer in a thread. The live storage stays unchanged only while `look` runs."""

        def read() -> None:
            try:
                try:
                    answer = look()
                finally:
                    self._reading.discard(id)
                self._reports.report(id, "looked", **answer())
            except TltError as refusal:
                self._reports.refuse(id, refusal)
            except Exception as cause:  # every command is answered
                error = PushFailed(
                    f"the weights in use cannot be read ({type(cause).__name__}: {cause}); nothing "
                    "has changed: ask again"
                )
                self._reports.refuse(id, error)

        self._reading.add(id)
        try:
            self._readers.start(read)
        except Unavailable:
            self._reading.discard(id)
            raise

    def _readable(self, name: str, rows: int, *, changing: bool) -> torch.Tensor:
        role = "drafter" if name.startswith(DRAFTER_PREFIX) else "target"
        part = self._versions.live.by_role.get(role)
        tensors = part.network.parameters() if part is not None else {}
        stored = tensors.get(name.removeprefix(DRAFTER_PREFIX))
        if stored is None:
            raise NotFound(
                f"there is no tensor {name[:200]!r}; POST /weight_checker lists the names"
            )
        if changing:
            raise Conflict(
                "the active weights are changing; read them once the push or rollback is answered"
            )
        if why := self._versions.quarantined.get(role):
            raise Conflict(f"{name[:200]!r} cannot be read: {why}; push that version, or another")
        tensor = whole(stored)
        numbers = tensor[:rows].numel()
        if numbers > MAX_NUMBERS:
            raise InvalidRequest(
                f"{rows} rows of {name[:200]!r}, of shape {list(tensor.shape)}, are {numbers} "
                f"numbers; the limit is {MAX_NUMBERS}: ask for at most "
                f"{MAX_NUMBERS // tensor[0].numel()} (truncate_size)"
            )
        return tensor[:rows]
