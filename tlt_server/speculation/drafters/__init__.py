"""Drafters: where candidate tokens come from. Any answer is lossless; a good one is fast.

A drafter may be as nondeterministic as it likes. One file each, one table line each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from tlt_server.records import Strategy
from tlt_server.registry import Registry
from tlt_server.speculation.batch import Candidates, DraftBatch

DRAFTERS = Registry(
    "drafter",
    {
        "eagle": "tlt_server.speculation.drafters.eagle:Eagle",
        "history": "tlt_server.speculation.drafters.history:History",
    },
)


class Drafter(Protocol):
    def propose(self, batch: DraftBatch, strategy: Strategy) -> Candidates:
        """Candidate trees no deeper than `strategy.depth` (nor `max_depth_B`), at most
        `strategy.width` children per node.
        """

    def observe(self, batch: DraftBatch, candidates: Candidates, accepted_N: object) -> None:
        """Which candidates were verified and accepted (int8 per node: -1 not verified, 0 rejected
        or unreached, 1 accepted).
        """

    def finish(
        self, request_id: str, group_id: str, tokens: object, prompt_len: int, salt: str = ""
    ) -> None:
        """A request has ended; its tokens may serve its siblings (of the same salt), its state may
        go.
        """

    def gauges(self) -> Mapping[str, float]: ...
