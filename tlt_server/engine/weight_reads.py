"""Readings of the live weights, in threads, as they take a while: checksums of all, and rows of one
tensor. Meanwhile the live storage must not change.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tlt_client.channels import DRAFTER_PREFIX
from tlt_server.commands import HandOver, LookAtWeights, ReadWeights
from tlt_server.engine.weight_reports import WeightReports
from tlt_server.errors import Conflict, InvalidRequest, NotFound, PushFailed, TltError, Unavailable
from tlt_server.threads import Crew
from tlt_server.weights.handover import hand_over
from tlt_server.weights.versions import Versions

MAX_READERS = 4  # at once, including those that wait for a change to end
MAX_NUMBERS = 2**21  # elements of a tensor, read by one command


class WeightReads:
    def __init__(self, versions: Versions, reports: WeightReports) -> None:
        self._versions, self._reports = versions, reports
        self._readers = Crew("read weights", MAX_READERS)
        self._waiting: list[str] = []  # ids of commands that came during a change

    @property
    def busy(self) -> bool:
        return self._readers.busy

    def look(self, command: LookAtWeights, *, changing: bool) -> None:
        """Answer with the versions; with checksums if they are asked for, after any change."""
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
        self._start(
            command.id,
            lambda: {
                "values": tensor.float().cpu().contiguous().numpy().tobytes(),
                "shape": list(tensor.shape),
            },
        )

    def hand_over(self, command: HandOver, *, changing: bool) -> None:
        """Answer with the versions that were written; `Conflict` during a change."""
        if changing:
            raise Conflict("the weights in use are about to change; ask once that is done")
        if self._versions.quarantined:
            raise Conflict("the weights in use are in doubt; push a version first")
        self._readers.check_room(len(self._waiting))
        live = self._versions.live

        def write() -> dict[str, Any]:
            hand_over(live, Path(command.directory), Path(command.drafter))
            return {}

        self._start(command.id, write)

    def advance(self) -> None:
        """Start the readings that waited; no change is under way."""
        waiting, self._waiting = self._waiting, []
        for id in waiting:
            try:
                self._sum(id)
            except Unavailable as error:
                self._reports.refuse(id, error)

    def _sum(self, id: str) -> None:
        live = self._versions.live
        parts = live.only(live.by_role)
        self._start(id, lambda: {"parts": parts, "checksums": live.live_sums()})

    def _start(self, id: str, look: Callable[[], dict[str, Any]]) -> None:
        """Answer in a thread with what `look` returns."""

        def read() -> None:
            try:
                self._reports.report(id, "looked", **look())
            except TltError as refusal:
                self._reports.refuse(id, refusal)
            except Exception as cause:  # every command is answered
                error = PushFailed(
                    f"the weights in use cannot be read ({type(cause).__name__}: {cause}); nothing "
                    "has changed: ask again"
                )
                self._reports.refuse(id, error)

        self._readers.start(read)

    def _readable(self, name: str, rows: int, *, changing: bool) -> torch.Tensor:
        role = "drafter" if name.startswith(DRAFTER_PREFIX) else "target"
        part = self._versions.live.by_role.get(role)
        tensors = part.network.parameters() if part is not None else {}
        tensor = tensors.get(name.removeprefix(DRAFTER_PREFIX))
        if tensor is None:
            raise NotFound(
                f"there is no tensor {name[:200]!r}; POST /weight_checker lists the names"
            )
        if changing:
            raise Conflict(
                "the weights in use are about to change, or change just now; read them once the "
                "push or rollback is answered"
            )
        if why := self._versions.quarantined.get(role):
            raise Conflict(f"{name[:200]!r} cannot be read: {why}; push that version, or another")
        numbers = tensor[:rows].numel()
        if numbers > MAX_NUMBERS:
            raise InvalidRequest(
                f"{rows} rows of {name[:200]!r}, of shape {list(tensor.shape)}, are {numbers} "
                f"numbers; the limit is {MAX_NUMBERS}: ask for at most "
                f"{MAX_NUMBERS // tensor[0].numel()} (truncate_size)"
            )
        return tensor[:rows]
