"""A drafter that knows the answers: the tokens that a run without drafts gave."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

from tlt_server.speculation.batch import Candidates, DraftBatch
from tlt_server.speculation.calibration import OnlineTable
from tlt_server.speculation.drafters.cpu import DraftSetup, DraftWeights, Sleeper
from tlt_server.wire.records import Strategy


class Oracle:
    """Proposes a chain of the tokens that follow."""

    answers: ClassVar[dict[str, list[int]]] = {}  # by request
    proposed = accepted = finished = 0

    @classmethod
    def make(cls, setup: DraftSetup) -> Oracle:
        assert setup.weights is None, "no directory was named"
        return cls()

    @property
    def caches(self) -> Sequence[Sleeper]:
        return ()

    @property
    def tables(self) -> Mapping[str, OnlineTable]:
        return {}

    def install(self, weights: DraftWeights | None) -> None:
        """Know the answers of the weights before."""

    def propose(self, batch: DraftBatch, strategy: Strategy) -> Candidates:
        chains = []
        for b, name in enumerate(batch.ids):
            done = len(batch.tokens[b]) - int(batch.prompt_len_B[b])
            length = min(strategy.depth, int(batch.max_depth_B[b]))
            chains.append(self.answers.get(name, [])[done : done + length])
        self.proposed += sum(map(len, chains))
        return chained(chains)

    def observe(self, batch: DraftBatch, candidates: Candidates, accepted_N: object) -> None:
        self.accepted += int((np.asarray(accepted_N) == 1).sum())

    def finish(
        self, request_id: str, group_id: str, tokens: object, prompt_len: int, salt: str = ""
    ) -> None:
        self.finished += 1

    def gauges(self) -> Mapping[str, float]:
        return {"oracle_proposed": float(self.proposed), "oracle_accepted": float(self.accepted)}


def chained(chains: Sequence[Sequence[int]]) -> Candidates:
    """Return one chain of drafts for each request."""
    nodes = [
        (request, level, token)
        for request, chain in enumerate(chains)
        for level, token in enumerate(chain)
    ]
    request = [request for request, _, _ in nodes]
    parent = [at - 1 if level else -1 for at, (_, level, _) in enumerate(nodes)]
    token = [token for _, _, token in nodes]
    depth = [level + 1 for _, level, _ in nodes]
    arrays = (np.array(values, np.int32) for values in (request, parent, token, depth))
    return Candidates(*arrays, np.zeros(len(nodes), np.int32), np.ones(len(nodes), np.float32))
