"""The exchange of CPU ranks: gloo gathers the bytes, and every rank adds them in tree order."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import FileStore  # type: ignore[attr-defined]

from tlt_kernels.cpu.checksums import mixed_sum
from tlt_server.attention.rows import Rows
from tlt_server.errors import EngineFailed
from tlt_server.models.split import folded

JOIN_S = 30.0  # for all ranks to connect
FIRST_S = 120.0  # for an exchange while ranks may still compile kernels
WAIT_S = 10.0  # for any later one


class GlooExchange:
    """One rank's exchange; all ranks make the same calls in the same order."""

    def __init__(
        self,
        store: Path,
        rank: int,
        ranks: int,
        *,
        left: Callable[[], None] = lambda: None,
        place: Callable[[], str] = str,
    ) -> None:
        """Join the other ranks. `store`: a file in a private directory, the same for all ranks.
        `left`: raises the reason if a rank has left and the reason is known soon. `place`:
        describes the current position. Both serve error messages. Failures are `EngineFailed`.
        """
        self.rank, self.ranks, self._left, self._place = rank, ranks, left, place
        self._wait_s = FIRST_S
        gloo = distributed.ProcessGroupGloo
        options = gloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=JOIN_S)
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
        try:
            self._group: Any = gloo(FileStore(str(store), ranks), rank, ranks, options)
        except RuntimeError as error:
            self._left()
            raise EngineFailed(
                f"rank {rank} could not connect to {self._others} in {JOIN_S:g} s ({_first(error)})"
            ) from None

    def ready(self) -> None:
        """Shorten the waits from now on. Rank 0 ends the other ranks, so they keep theirs."""
        self._wait_s = WAIT_S

    def add(self, part_RX: Tensor) -> Tensor:
        return folded(self.gathered(part_RX))

    def join(self, part_RX: Tensor, widths: Sequence[int], check: int) -> Tensor:
        rows, widest = len(part_RX), max(widths)
        sent = torch.zeros(2 + rows * widest, dtype=torch.int32)  # bits: no number is touched
        sent[:2] = torch.tensor([_signed(check)]).view(torch.int32)
        sent[2:].view(torch.float32).view(rows, widest)[:, : part_RX.shape[1]] = part_RX
        found = self.gathered(sent)
        checks = [each[:2].view(torch.int64).item() for each in found]
        differing = [rank for rank, value in enumerate(checks) if value != checks[0]]
        if differing:
            raise EngineFailed(
                f"ranks differ{self._place()}: the states of rank "
                f"{', '.join(map(str, differing))} are not those of rank 0"
            )
        parts = [each[2:].view(torch.float32).view(rows, widest) for each in found]
        return torch.cat([part[:, :n] for part, n in zip(parts, widths, strict=True)], dim=1)

    def gathered(self, part: Tensor) -> list[Tensor]:
        part = part.contiguous()
        found = [torch.empty_like(part) for _ in range(self.ranks)]
        try:
            self._group.allgather(found, part, timedelta(seconds=self._wait_s)).wait()
        except RuntimeError as error:
            self._left()
            raise EngineFailed(
                f"{self._others} left, or sent nothing for {self._wait_s:g} s{self._place()} "
                f"({_first(error)})"
            ) from None
        return found

    @property
    def _others(self) -> str:
        others = [str(rank) for rank in range(self.ranks) if rank != self.rank]
        return f"rank {' or '.join(others)}"


def sum_of_states(hidden_RH: Tensor, rows: Rows) -> int:
    """Return a 64-bit checksum of what every rank must hold after a step, for a comparison in
    `join`: the last normed rows and their layout.
    """
    laid_out = torch.cat([rows.token_R, rows.position_R, rows.kv_slot_R, rows.request_R])
    return (mixed_sum(hidden_RH)[0] + 3 * mixed_sum(laid_out)[0]) % 2**64


def _first(error: RuntimeError) -> str:
    """Return the error's first line without its position in gloo's source."""
    return re.sub(r"^\[\S+\] ", "", str(error).splitlines()[0])[:200]


def _signed(value: int) -> int:
    """Return the signed number with the same 64 bits."""
    return (value + 2**63) % 2**64 - 2**63
