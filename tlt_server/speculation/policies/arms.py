"""Default arms: a ladder of strategies per drafter, and how many verify rows a batch can afford.

TLT maps batch buckets 1 / 2 / 5 / 21 to 48 / 32 / 16 / 8 verify rows per request at depth 8 and top-k 4 (on a GPU, where 64 rows
cost what one does). A CPU pays for rows much earlier, so its ladder is of chains, few and well apart (a cold batch is too short to
tell neighbours apart), and its ceilings fall faster. Buckets are narrow where batches are small, since a reward grows with the batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tlt_server.records import OFF, Strategy

CPU_LADDERS: dict[str, tuple[tuple[int, int, int], ...]] = {  # (depth, width, rows)
    "eagle": ((2, 1, 3), (4, 1, 5), (7, 1, 8)),
    "history": ((2, 1, 3), (7, 1, 8)),
}
CPU_ROWS = ((1, 16), (2, 16), (3, 9), (6, 9), (12, 5), (24, 5), (48, 3))  # (smallest batch, most verify rows per request)


def ladder(drafters: Iterable[str]) -> tuple[Strategy, ...]:
    """OFF and every default arm of these drafters."""
    return (OFF, *(Strategy(drafter, *arm) for drafter in drafters for arm in CPU_LADDERS.get(drafter, ())))


def affordable(arms: Sequence[Strategy], rows: int) -> tuple[Strategy, ...]:
    """OFF and the arms of at most `rows` verify rows per request."""
    return (OFF, *dict.fromkeys(arm for arm in arms if arm != OFF and arm.rows <= rows))
