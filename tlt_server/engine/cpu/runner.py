"""Runs one batch on a CPU, within `launch`: draft, verify, sample, accept, commit KV.

The scheduler and the policy have chosen the requests and the strategy. Nothing here changes a
token: the target's sample at every row is fixed by weights, prefix, parameters and seed, and drafts
only decide how many of these samples one pass yields.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tlt_kernels.cpu.elementwise import copy_kv_slots
from tlt_server.attention.rows import KVCache
from tlt_server.engine.cpu.batching import LaidOut, draft_batch, extend, lay_out
from tlt_server.engine.cpu.orders import Keep
from tlt_server.engine.exchange.gloo import sum_of_states
from tlt_server.engine.ranks.orders import NO_RANKS, RankOrders
from tlt_server.engine.runner import NOT_FINITE, Finished
from tlt_server.engine.sampling.sampler import Sampled, prompt_logprobs, sample
from tlt_server.engine.schedule.batch import Batch
from tlt_server.engine.schedule.sequence import Emission
from tlt_server.errors import NotFinite
from tlt_server.models import Forward
from tlt_server.models.adapted import AdaptedLayer, AdapterSlots
from tlt_server.models.decoder import Decoder
from tlt_server.speculation.accept import Walk, accept
from tlt_server.speculation.batch import Candidates
from tlt_server.speculation.branches import Proposing, branches_of, branching, with_branches
from tlt_server.speculation.calibration import OnlineTable
from tlt_server.speculation.drafters.cpu import CpuDrafter
from tlt_server.speculation.knowledge import Drafted
from tlt_server.speculation.tree import select
from tlt_server.wire.records import OFF, Cycle, Strategy, TokenLogprobs
from tlt_server.wire.tree_limits import MAX_ROWS

LEFT_OUT = -2  # a token that no target samples


class CpuRunner:
    def __init__(
        self,
        model: Decoder,
        cache: KVCache,
        drafters: dict[str, CpuDrafter],
        page_table_SP: NDArray[np.int32],
        adapters: AdapterSlots | None = None,
        ranks: RankOrders = NO_RANKS,
    ) -> None:
        self.adapters, self.ranks = adapters, ranks
        self.model, self._cache, self._drafters, self._page_table_SP = (
            model,
            cache,
            drafters,
            page_table_SP,
        )
        self._drafts = with_branches(drafters)
        self.sample, self.learns = sample, True
        self._finished: Finished | None = None

    @property
    def tables(self) -> dict[str, OnlineTable]:
        """Return the tables of drafters and of branches."""
        found: dict[str, OnlineTable] = {}
        for drafter in self._drafters.values():
            found |= drafter.tables
        for name, drafts in branching(self._drafts).items():
            found[branches_of(name)] = drafts.table
        return found

    @property
    def in_flight(self) -> int:
        return int(self._finished is not None)

    def collect(self, *, busy: bool) -> Finished | None:
        """Return the batch just launched, `busy` or not: on a CPU nothing is late."""
        self.ranks.check()
        finished, self._finished = self._finished, None
        return finished

    def gauges(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for drafter in self._drafters.values():
            found |= drafter.gauges()
        for drafts in branching(self._drafts).values():
            found |= drafts.gauges()
        return found

    @torch.inference_mode()
    def launch(self, batch: Batch, strategy: Strategy) -> None:
        drafts = _draft(batch, strategy, self._drafts, self._page_table_SP, self._cache.scratch)

        step = lay_out(
            batch,
            self._page_table_SP,
            self._cache,
            drafts.chunk_N,
            drafts.parent_N,
            drafts.candidates,
            drafts.chosen_N,
        )
        scored = _scored(batch, step)
        self.ranks.order(extend(step, [*scored.values()]))
        forward = self.model.forward(step.rows, self._cache, self._adapted(batch, step))
        for kept_SX, states_RX in self._states(forward):
            kept_SX.numpy()[step.layout.kv_slot_R] = states_RX.numpy()
        sampled, walk = self._sample(batch, step, forward)
        self._commit_kv(step, walk)

        own_N = drafts.candidates.rank_N[drafts.chosen_N] >= 0
        emissions = _emissions(batch, step, sampled, walk, own_N)
        self._add_prompt_logprobs(batch, scored, forward, emissions)
        accepted_R = np.zeros(len(step.rows), np.int8)
        accepted_R[walk.row_A] = 1
        # Drafts of a sequence that fails or is left out say nothing of others.
        sound_W = np.array([bool(emission.tokens) for emission in emissions])
        sound_N = sound_W[drafts.chunk_N]
        if self.learns:
            drafts.observe(np.where(sound_N, accepted_R[step.layout.parent_R >= 0], -1))
        cycle = Cycle(
            context=batch.context,
            strategy=strategy if drafts.requests else OFF,
            rows=len(step.rows),
            accepted=tuple(
                len(emission.tokens) - 1
                for chunk, emission in zip(batch.chunks, emissions, strict=True)
                if chunk.decodes and emission.tokens
            ),
            drafted=int(sound_N.sum()),
        )
        self._finished = Finished(batch, emissions, cycle, drafts.drafted(sound_N))

    def _adapted(self, batch: Batch, step: LaidOut) -> list[AdaptedLayer] | None:
        if self.adapters is None:
            return None
        slot_W = np.array([chunk.sequence.slot for chunk in batch.chunks], np.int32)
        return self.adapters.of_rows(slot_W[step.layout.request_R])

    def _states(self, forward: Forward) -> list[tuple[Tensor, Tensor]]:
        """Return the states kept per KV slot, each with this step's rows."""
        cache = self._cache
        found = ((cache.features_SF, forward.features_RF), (cache.hidden_SH, forward.hidden_RH))
        return [(kept_SX, rows_RX) for kept_SX, rows_RX in found if kept_SX.shape[1]]

    def _sample(self, batch: Batch, step: LaidOut, forward: Forward) -> tuple[Sampled, Walk]:
        layout = step.layout
        states = [chunk.sequence.state for chunk in batch.chunks]
        shared = self.model.split.of > 1
        check = sum_of_states(forward.hidden_RH, step.rows) if shared else 0
        hidden_SH = forward.hidden_RH[torch.from_numpy(step.sampled_R)]
        logits_SV = self.model.logits(hidden_SH, check)
        sampled = self.sample(
            logits_SV,
            states,
            layout.request_R[step.sampled_R].astype(np.int64),
            layout.position_R[step.sampled_R] + 1,
            layout.path_token_RD[step.sampled_R],
        )
        target_R = np.full(len(step.rows), -1, np.int32)
        target_R[step.sampled_R] = sampled.token_S
        token_R = layout.token_R.copy()
        token_R[step.sampled_R[sampled.token_S < 0]] = LEFT_OUT
        return sampled, accept(
            layout.root_W, layout.drafts_W + 1, layout.parent_R, token_R, target_R
        )

    def _commit_kv(self, step: LaidOut, walk: Walk) -> None:
        """Copy accepted draft rows from scratch to the pages of their positions."""
        layout, size = step.layout, self._cache.page_size
        kept = walk.row_A
        if not len(kept):
            return
        position = layout.position_R[kept]
        target = (
            step.table_WP[layout.request_R[kept], position // size].astype(np.int64) * size
            + position % size
        )
        source = layout.kv_slot_R[kept]
        self.ranks.order(Keep(source, target))
        source_A, target_A = torch.from_numpy(source), torch.from_numpy(target)
        cache = self._cache
        for array in (cache.k, cache.v, cache.features_SF[None], cache.hidden_SH[None]):
            copy_kv_slots(array, source_A, target_A)

    def _add_prompt_logprobs(
        self,
        batch: Batch,
        scored: dict[int, tuple[int, int]],
        forward: Forward,
        emissions: list[Emission],
    ) -> None:
        """Add the log-probs of prompt tokens for the few requests that want them. Row p gives those
        of position p + 1. `scored`: the rows of each chunk, the same on all ranks.
        """
        for w, (chunk, emission) in enumerate(zip(batch.chunks, emissions, strict=True)):
            sequence, count = chunk.sequence, chunk.sequence.request.sampling.prompt_logprobs
            if count is None or sequence.output_len:
                continue
            found: list[TokenLogprobs | None] = [None] if chunk.start == 0 else []
            if w in scored:
                first, end = scored[w]
                logits = self.model.logits(forward.hidden_RH[first:end])
                targets = sequence.tokens[chunk.start + 1 : chunk.start + 1 + end - first]
                found += prompt_logprobs(logits, targets.tolist(), count)
            emission.prompt_logprobs = found


def _scored(batch: Batch, step: LaidOut) -> dict[int, tuple[int, int]]:
    """Return the rows of prompt tokens that need log-probs: chunk -> [first, end)."""
    found, first = {}, 0
    for w, chunk in enumerate(batch.chunks):
        sequence = chunk.sequence
        rows = min(chunk.end, sequence.prompt_len - 1) - chunk.start
        asked = sequence.request.sampling.prompt_logprobs is not None
        if asked and sequence.output_len == 0 and rows > 0:
            found[w] = first, first + rows
        first = int(step.layout.root_W[w] + step.layout.drafts_W[w]) + 1
    return found


class _Drafts(NamedTuple):
    """The draft rows of one step, and the drafter that learns their outcome."""

    candidates: Candidates
    chosen_N: NDArray[np.int32]
    parent_N: NDArray[np.int32]
    chunk_N: NDArray[np.int32]
    learn: Callable[[NDArray[np.int8]], None]  # by candidate: accepted 1, rejected 0, unknown -1
    requests: int = 0  # takers of drafts of this drafter

    def drafted(self, sound_N: NDArray[np.bool_]) -> Drafted | None:
        """Return the trees, if there are any. `sound_N`: the chosen nodes whose outcome counts."""
        if not self.requests:
            return None
        acceptance_N = self.candidates.acceptance_N[self.chosen_N]
        return Drafted(self.candidates, self.requests, float(acceptance_N[sound_N].sum()))

    def observe(self, accepted_N: NDArray[np.int8]) -> None:
        """Report for every chosen node, in order, whether it is on its request's path; -1 if
        unknown.
        """
        outcome = np.full(len(self.candidates), -1, np.int8)
        outcome[self.chosen_N] = accepted_N
        self.learn(outcome)


def _draft(
    batch: Batch,
    strategy: Strategy,
    drafters: Mapping[str, Proposing],
    page_table_SP: NDArray[np.int32],
    scratch: int,
) -> _Drafts:
    """Let the strategy's drafter propose nodes, and choose at most `scratch` to verify."""
    limits = {
        w: limits
        for w, chunk in enumerate(batch.chunks)
        if chunk.decodes
        and (limits := chunk.sequence.draft_limits)
        and limits.permits(strategy.drafter)
    }
    if not strategy.drafter or not limits:
        none_N = np.zeros(0, np.int32)
        return _Drafts(Candidates.empty(), none_N, none_N, none_N, lambda outcome: None)
    drafter = drafters[strategy.drafter]
    seen = draft_batch([batch.chunks[w] for w in limits], [*limits.values()], page_table_SP)
    candidates = drafter.propose(seen, strategy)
    budget = min(strategy.draft_rows(len(limits)), scratch)
    most_B = np.array([limit.max_rows - 1 for limit in limits.values()], np.int32)
    limited = bool((most_B < MAX_ROWS - 1).any())
    chosen_N, parent_N, _ = select(candidates, len(limits), budget, most_B if limited else None)
    chunk_N = np.array([*limits], np.int32)[candidates.request_N[chosen_N]]
    return _Drafts(
        candidates,
        chosen_N,
        parent_N,
        chunk_N,
        partial(drafter.observe, seen, candidates),
        len(limits),
    )


def _emissions(
    batch: Batch, step: LaidOut, sampled: Sampled, walk: Walk, own_N: NDArray[np.bool_]
) -> list[Emission]:
    """Return the target's tokens along each chunk's accepted path, with log-probs. own_N: which
    draft rows are the drafter's rather than a branch's.
    """
    at_R = np.full(len(step.rows), -1, np.int64)  # row -> its index among the sampled rows
    at_R[step.sampled_R] = np.arange(len(step.sampled_R))
    tokens, logprobs = sampled.token_S.tolist(), sampled.logprob_S.tolist()
    raw_logprobs = sampled.raw_logprob_S.tolist() if sampled.raw_logprob_S is not None else []
    broken = bool(np.isnan(sampled.logprob_S).any())
    roots, accepted, lengths = (
        at_R[step.layout.root_W].tolist(),
        at_R[walk.row_A].tolist(),
        walk.length_B.tolist(),
    )
    drafts = step.layout.drafts_W.tolist()
    own_R = np.zeros(len(step.rows), np.bool_)
    own_R[step.layout.parent_R >= 0] = own_N
    of_W = step.layout.request_R
    own_drafts = np.bincount(of_W[own_R], minlength=len(drafts)).tolist()
    kept_R = walk.row_A[own_R[walk.row_A]]
    own_accepted = np.bincount(of_W[kept_R], minlength=len(drafts)).tolist()
    emissions, first = [], 0
    for w, chunk in enumerate(batch.chunks):
        path = [roots[w], *accepted[first : first + lengths[w]]]
        first += lengths[w]
        if not chunk.samples or tokens[roots[w]] < 0:
            emissions.append(Emission())
            continue
        emission = Emission(
            tokens=[tokens[s] for s in path],
            logprobs=[logprobs[s] for s in path],
            drafted=drafts[w],
            accepted=lengths[w],
            own_drafted=own_drafts[w],
            own_accepted=own_accepted[w],
        )
        if broken and any(math.isnan(logprob) for logprob in emission.logprobs):
            emission = Emission(error=chunk.sequence.state.error or NotFinite(NOT_FINITE))
        sampling = chunk.sequence.request.sampling
        if sampling.raw_logprobs:
            emission.raw_logprobs = [raw_logprobs[s] for s in path]
        if sampling.logprobs:
            emission.top_logprobs = [top for s in path if (top := sampled.top[s]) is not None]
        emissions.append(emission)
    return emissions
