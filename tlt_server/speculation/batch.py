"""The input and the output of a drafter. Numpy only, so drafters without a network need no torch.

Legend: B requests that may be speculated on, P pages, N candidate nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tlt_server.samples.samples import Responses


@dataclass(frozen=True)
class DraftBatch:
    """Requests to verify next. The *root* of request b is its last token, at position
    len(tokens[b]) - 1. Its KV (and feature) is not computed yet; that of all earlier positions is.
    """

    ids: list[str]
    group_ids: list[str]
    tokens: list[NDArray[np.int32]]  # prompt + output, root last; views, do not write
    prompt_len_B: NDArray[np.int32]
    page_table_BP: NDArray[np.int32]
    seed_B: NDArray[np.uint64]
    temperature_B: NDArray[np.float32]
    max_depth_B: NDArray[np.int32]  # draft tokens that can still be used before max_tokens
    salts: Sequence[
        str
    ] = ()  # per request: text is never shared between salts; empty = no request has one
    # Per request: the only drafter that may draft for it, empty = any; no names = any for all.
    drafters: Sequence[str] = ()

    def __len__(self) -> int:
        return len(self.ids)

    @classmethod
    def of(
        cls,
        responses: Responses,
        number_B: NDArray[np.int64],
        root_B: NDArray[np.int64],
        page_table_BP: NDArray[np.int32],
        capacity_B: NDArray[np.int64] | None = None,
    ) -> DraftBatch:
        """Return the batch of recorded responses, by number, at these roots. `capacity_B`: how many
        tokens of each response fit in its pages; None: the pages bound no response.
        """
        # As in serving: the last token that max_tokens permits is never a draft.
        longest_B = responses.max_tokens_N[number_B].astype(np.int64)
        last_B = responses.prompt_len_N[number_B] + longest_B - 1
        if capacity_B is not None:
            last_B = np.minimum(last_B, capacity_B)
        pairs = zip(number_B.tolist(), root_B.tolist(), strict=True)
        return cls(
            ids=[str(n) for n in number_B.tolist()],
            group_ids=[str(group) for group in responses.group_N[number_B].tolist()],
            tokens=[responses.tokens(n)[: root + 1] for n, root in pairs],
            prompt_len_B=responses.prompt_len_N[number_B],
            page_table_BP=page_table_BP,
            seed_B=responses.seed_N[number_B],
            temperature_B=responses.temperature_N[number_B],
            max_depth_B=np.maximum(0, last_B - root_B - 1).astype(np.int32),
        )


@dataclass(frozen=True)
class Candidates:
    """Draft trees of a batch as flat arrays; a parent comes before its children."""

    request_N: NDArray[np.int32]
    parent_N: NDArray[np.int32]  # index into N, -1 = the request's root
    token_N: NDArray[np.int32]
    depth_N: NDArray[np.int32]  # 1 = child of the root
    rank_N: NDArray[np.int32]  # 0 = the parent's best child; -1 = of a branch, see `branches`
    acceptance_N: NDArray[
        np.float32
    ]  # calibrated probability that the node is on the path; never above its parent's
    # Index into the drafter's calibration table; empty where the host was not told.
    cell_N: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))

    def __len__(self) -> int:
        return len(self.request_N)

    @staticmethod
    def empty() -> Candidates:
        i, f = np.zeros(0, np.int32), np.zeros(0, np.float32)
        return Candidates(i, i, i, i, i, f, i)
