"""Default arms: a ladder of strategies per drafter, and how many verify rows a batch can afford.

TLT maps batch buckets 1 / 2 / 5 / 21 to 48 / 32 / 16 / 8 verify rows per request at depth 8 and
top-k 4, on a GPU, where 64 rows of the whole batch cost what one does and the ridge is near 200. A
CPU pays for rows much earlier, so its ladder is of chains, few and well apart (a cold batch is too
short to tell neighbours apart), and its ceilings fall faster. Buckets are narrow where batches are
small, since a reward grows with the batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from tlt_server.records import OFF, Strategy
from tlt_server.speculation.drafters import DRAFTERS

Rows = tuple[tuple[int, int], ...]  # (smallest batch, most verify rows per request)

CPU_ROWS: Rows = ((1, 16), (2, 16), (3, 9), (6, 9), (12, 5), (24, 5), (48, 3))
GPU_ROWS: Rows = ((1, 32), (2, 32), (3, 16), (5, 16), (9, 8), (17, 8), (33, 4), (65, 3), (129, 1))
ROWS = {"cpu": CPU_ROWS, "cuda": GPU_ROWS, "interpreter": GPU_ROWS}  # by device


@dataclass(frozen=True)
class Ladder:
    """The arms a policy may choose from, OFF first, and what each batch size can afford."""

    arms: tuple[Strategy, ...]
    rows: Rows
    drafters: tuple[str, ...] = ()

    def with_arm(self, arm: Strategy) -> Ladder:
        return replace(self, arms=tuple(dict.fromkeys((*self.arms, arm))))


def ladder(drafters: Iterable[str], device: str = "cpu") -> Ladder:
    """OFF and every default arm of these drafters on this kind of device."""
    names = tuple(drafters)
    arms = (Strategy(name, *rung) for name in names for rung in DRAFTERS[name].half(device).rungs)
    return Ladder((OFF, *arms), ROWS[device], names)


def affordable(arms: Sequence[Strategy], rows: int) -> tuple[Strategy, ...]:
    """OFF and the arms of at most `rows` verify rows per request."""
    return (OFF, *dict.fromkeys(arm for arm in arms if arm != OFF and arm.rows <= rows))
