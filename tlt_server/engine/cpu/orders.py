"""Orders to the ranks of a CPU: the steps, and the target that computes them."""

from __future__ import annotations

from tlt_server.engine.ranks.orders import Array, RankOrder


class ExtendRows(RankOrder, frozen=True):
    """Extend sequences by a step's rows (`attention.rows.Rows`), and help compute the logits of
    `sampled_R`, then of each range of rows.
    """

    token_R: Array
    position_R: Array
    kv_slot_R: Array
    request_R: Array
    base_B: Array
    page_table_BP: Array
    path_RD: Array
    sampled_R: Array
    scored: list[tuple[int, int]]


class Keep(RankOrder, frozen=True):
    """Copy the KV of accepted draft rows."""

    source_A: Array
    target_A: Array


class CheckNumerics(RankOrder, frozen=True):
    """Test the numerics on the model of this key, and answer with the matmul method."""

    key: int


class Install(RankOrder, frozen=True):
    """Compute with the target of this key from the next step on."""

    key: int
