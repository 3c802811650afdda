"""The CPU half of rank 0's `Ranks`: gloo, and shards in mapped files."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tlt_server.engine.cpu.orders import CheckNumerics
from tlt_server.engine.exchange.gloo import GlooExchange
from tlt_server.engine.ranks.arena import Arena, arena_bytes, layout
from tlt_server.engine.ranks.ranks import Ranks
from tlt_server.engine.ranks.shared_models import key_of
from tlt_server.errors import StartupError
from tlt_server.models.decoder import Decoder
from tlt_server.models.shards import all_tensors


class CpuLink:
    moves, answer_s = False, 10.0

    def __init__(self, ranks: Ranks[Any], directory: Path) -> None:
        """Join the workers."""
        left, place = partial(ranks.check_ended, left=True), lambda: f" after order {ranks.sent}"
        self.exchange = GlooExchange(directory / "store", 0, ranks.count, left=left, place=place)

    def ready(self) -> None:
        self.exchange.ready()

    def arena(self, rank: int, make: Callable[[], Any]) -> Arena:
        with torch.device("meta"):
            size = arena_bytes(all_tensors(make().own_parameters()))
        return Arena.file(size)

    @staticmethod  # a bound method would keep the ranks
    def close() -> None:
        """Do nothing: a file's memory ends with its tensors."""


def check_numerics(ranks: Ranks[CpuLink], target: Decoder) -> None:
    """Test the numerics of every rank. `StartupError` if they differ from rank 0's."""
    own = target.numerics.method.name
    found = ranks.ask(CheckNumerics(key_of(target)))
    for peer, text in zip(target.peers, found, strict=True):
        method, _, lies = text.partition("; ")
        if method != own or lies != layout(peer):
            raise StartupError(
                f"rank {peer.split.rank} has {method} and another layout of its weights or "
                f"method than rank 0, which has {own}; start the same version on one machine"
            )
