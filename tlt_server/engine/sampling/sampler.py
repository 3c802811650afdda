"""The sampler: turns fp32 logits rows into tokens and log-probs, one keyed argmax per row.

The runner calls `sample` on the rows of a step (plain decoding, prefill ends and draft-tree nodes
alike) and `SamplingState.commit` with the accepted tokens. A row's result is a pure function of its
logits, its sequence's parameters and seed, its position and the earlier tokens; the batch has no
influence. Penalties and min_tokens count the row's draft path, so they are exact inside the draft
window. The arithmetic is in `tlt_kernels.cpu.sampling`.

Legend: S rows, V vocabulary, D path depth, E edited rows (bias, penalties or mask), K alternatives.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tlt_kernels.cpu.sampling import PARAMETERS, edit_row, mask_row, sample_rows, score_targets
from tlt_server.engine.sampling.structures import Structure, Structures
from tlt_server.errors import InvalidRequest, StructureFailed
from tlt_server.grammars.masks import WORD
from tlt_server.wire.records import GenerateRequest, Sampling, TokenLogprobs

MAX_LISTED = 8192  # tokens that a sequence's biases and masks may name
NO_COUNTS_V = np.zeros(0, np.int32)
NO_IDS = np.zeros(0, np.int64)


class _Ban(NamedTuple):
    before: list[int]
    last: int


class BadWords:
    """One sequence's forbidden words of several tokens, in the form of a `Structure`. A word's last
    token may not follow its other tokens, whether these are drafts or not. Forbidden words of one
    token are biases.
    """

    ready, quick, error = True, True, None  # nothing is compiled, and some token can always follow

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        """`words`: the tokens of each word, at least two."""
        self._bans: dict[int, list[_Ban]] = {}  # by the token before the last
        for *before, last in words:
            self._bans.setdefault(before[-1], []).append(_Ban(before, last))
        self._longest = max(map(len, words)) - 1
        self._committed: list[int] = []  # the newest output tokens

    def commit(self, tokens: Sequence[int]) -> None:
        """Note output tokens that were appended to the sequence."""
        self._committed = [*self._committed, *tokens][-self._longest :]

    def rest(self) -> None:
        """Do nothing: it holds no memory to free."""

    def fill(self, path: Sequence[int], mask_W: NDArray[np.int32], certain: int = 0) -> bool:
        """Set the bit of each token that may follow the committed tokens and the drafts of `path`:
        all but those that would complete a word. Words count in the output only.
        """
        mask_W.fill(-1)
        text = [*self._committed, *path]
        for before, last in self._bans.get(text[-1], ()) if text else ():
            if text[-len(before) :] == before:
                mask_W.view(np.uint32)[last // WORD] &= ~np.uint32(1 << last % WORD)
        return True


class SamplingState:
    """One sequence's parameters, packed once, and the counts that penalties need."""

    def __init__(
        self,
        request: GenerateRequest,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        structures: Structures | None = None,
    ) -> None:
        """Pack the request's parameters. `structures`: for requests with a structured output.
        Raises `InvalidRequest` if the request has ended with its generated tokens. A bias on a
        token outside the vocabulary is an AssertionError, as the frontend refuses it.
        """
        sampling = request.sampling
        self.stop_ids = frozenset(sampling.stop_token_ids) | (
            frozenset() if sampling.ignore_eos else frozenset(eos_token_ids)
        )
        self.alternatives = sampling.logprobs
        self.raw = sampling.raw_logprobs
        self.packed = _packed(sampling, request.seed)
        self.penalties = (
            sampling.repetition_penalty,
            sampling.presence_penalty,
            sampling.frequency_penalty,
        )
        self.penalised = self.penalties != (1.0, 0.0, 0.0)
        banned = [ids[0] for ids in sampling.bad_words if len(ids) == 1]
        biases = sampling.logit_bias | dict.fromkeys(banned, -np.inf)
        self.bias_ids = np.array(list(biases), np.int64)
        self.bias = np.array(list(biases.values()), np.float32)
        self.allowed_ids = np.array(sampling.allowed_token_ids, np.int64)
        named = [*biases, *sampling.allowed_token_ids, *chain(*sampling.bad_words)]
        assert all(0 <= i < vocab_size for i in named), "an edited token outside the vocabulary"
        masked = [i for i in self.stop_ids if 0 <= i < vocab_size] if sampling.min_tokens else []
        self.mask_ids = np.array(sorted(masked), np.int64)
        # The first position at which the masked tokens are allowed.
        self.masked_to = len(request.token_ids) + sampling.min_tokens
        grammar = sampling.structured_outputs
        assert grammar is None or structures is not None, "a structure without a compiler"
        self.structure: Structure | BadWords | None = (
            structures.of(grammar, self.stop_ids, request.owner) if structures else None
        )
        if several := [ids for ids in sampling.bad_words if len(ids) > 1]:
            assert grammar is None, "a structure with bad words"
            self.structure = BadWords(several)
        self._always = self.penalised or len(self.bias_ids) > 0 or len(self.allowed_ids) > 0
        self.edits = self._always or sampling.min_tokens > 0
        self._prompt = request.token_ids
        self._committed = 0  # output tokens; kept only with penalties
        self._uncounted: list[int] = []  # those not in _count_V yet
        self._prompt_V, self._count_V = np.zeros(0, np.uint8), NO_COUNTS_V
        self._check_listed(request)
        self._check_generated(request, vocab_size)
        self.commit(request.generated)

    def commit(self, tokens: Sequence[int]) -> None:
        """Note output tokens that were appended to the sequence."""
        if self.structure is not None:
            self.structure.commit(tokens)
        if self.penalised:
            self._committed += len(tokens)
            self._uncounted.extend(tokens)

    def rest(self) -> None:
        """Note that the sequence has lost its batch slot."""
        if self.structure is not None:
            self.structure.rest()

    def _count(self, vocab_size: int) -> None:
        """Update the counts. A GPU counts by itself, so they are made only when they are read."""
        if not len(self._count_V):
            self._prompt_V = np.zeros(vocab_size, np.uint8)
            self._count_V = np.zeros(vocab_size, np.int32)
            self._prompt_V[np.array([*self._prompt], np.int64)] = 1
        for token in self._uncounted:
            self._count_V[token] += 1
        self._uncounted.clear()

    def _check_listed(self, request: GenerateRequest) -> None:
        listed = len(self.bias_ids) + len(self.mask_ids) + len(self.allowed_ids)
        if listed > MAX_LISTED:
            raise InvalidRequest(
                f"request {request.id}: logit_bias, bad_words, allowed_token_ids and, with "
                f"min_tokens, the stop token ids name {listed} tokens; the limit is {MAX_LISTED}: "
                "leave some out"
            )

    def _check_generated(self, request: GenerateRequest, vocab_size: int) -> None:
        generated, max_tokens = request.generated, request.sampling.max_tokens
        where = f"request {request.id}: generated has"
        if generated and len(generated) >= max_tokens:
            raise InvalidRequest(
                f"{where} {len(generated)} tokens and max_tokens is {max_tokens}; it has ended, so "
                "do not submit it again"
            )
        if ended := self.stop_ids & set(generated):
            raise InvalidRequest(
                f"{where} the stop token {min(ended)}; it has ended, so do not submit it again"
            )
        if generated and not 0 <= min(generated) <= max(generated) < vocab_size:
            raise InvalidRequest(
                f"{where} the token id {max(generated)}; ids of this model end at "
                f"{vocab_size - 1}: it was generated by another model, so submit it without"
            )

    @property
    def ready(self) -> bool:
        """Return True if a step may sample for the sequence."""
        return self.structure is None or self.structure.ready

    @property
    def quick(self) -> bool:
        """Return True if a step may sample for the sequence, and verify drafts, before the host
        knows its newest tokens.
        """
        return self.structure is None or self.structure.quick

    @property
    def error(self) -> StructureFailed | None:
        """The reason why no token can follow, or None."""
        return self.structure.error if self.structure is not None else None

    def edits_at(self, position: int) -> bool:
        """Return True if masks aside, the logits of the token at this absolute position are edited.
        Once False, it stays False for later positions.
        """
        return self._always or position < self.masked_to

    def edit(
        self,
        logits_V: NDArray[np.float32],
        position: int,
        path_D: NDArray[np.int32],
        edited_V: NDArray[np.float32],
    ) -> bool:
        """Write the logits with bias, penalties and masks to `edited_V`. path_D: the draft tokens
        after the committed output. Return False to leave the row out of the step.
        """
        if self.penalised:
            on_path = int((path_D >= 0).sum())
            assert self._committed + on_path == position - len(self._prompt), (
                "path and position disagree"
            )
            self._count(len(logits_V))
        if self.edits_at(position):
            repetition, presence, frequency = self.penalties
            edit_row(
                logits_V,
                self.bias_ids,
                self.bias,
                self._prompt_V,
                self._count_V,
                path_D,
                np.float32(repetition),
                np.float32(presence),
                np.float32(frequency),
                self.mask_ids if position < self.masked_to else NO_IDS,
                edited_V,
            )
        else:
            edited_V[:] = logits_V
        if len(self.allowed_ids):
            kept = edited_V[self.allowed_ids]
            edited_V.fill(-np.inf)
            edited_V[self.allowed_ids] = kept
        if self.structure is not None:
            mask_W = np.empty(-(-len(logits_V) // WORD), np.int32)
            drafts = [token for token in path_D.tolist() if token >= 0]
            taken = self.structure.fill(drafts, mask_W)
            mask_row(edited_V, mask_W)
            return taken
        return True


class Sampled(NamedTuple):
    """Samples of one step. A NaN log-prob marks a row with broken logits (NaN, or no finite
    maximum).
    """

    token_S: NDArray[np.int64]  # -1 where the step leaves the row out
    # Under the processed distribution (T = 0: at temperature 1, no filters).
    logprob_S: NDArray[np.float32]
    # Under the unprocessed logits; NaN where not asked for; None if no row asks.
    raw_logprob_S: NDArray[np.float32] | None
    top: list[TokenLogprobs | None]  # kept tokens only, best first; None where not asked


def sample(
    logits_SV: torch.Tensor,
    states: Sequence[SamplingState],
    state_S: NDArray[np.int64],
    position_S: NDArray[np.int64],
    path_SD: NDArray[np.int32],
) -> Sampled:
    """Sample every row.

    logits_SV: float32 on the CPU. state_S: the row's index into `states`. position_S: absolute
    position of the token being sampled, the row's own position + 1. path_SD: draft tokens between
    the committed output and that position, the row's own token included, padded with -1.
    """
    assert logits_SV.dtype == torch.float32, logits_SV.dtype
    rows_SV = np.ascontiguousarray(logits_SV.detach().numpy())
    state_S = np.ascontiguousarray(state_S, np.int64)
    position_S = np.ascontiguousarray(position_S, np.int64)
    count, size = rows_SV.shape
    edited_EV, edited_S, left_out = _edited(rows_SV, states, state_S, position_S, path_SD)
    parameters = np.frombuffer(b"".join([state.packed for state in states]), PARAMETERS)
    depth = min(size, max((state.alternatives for state in states), default=0))
    raw = any(state.raw for state in states)
    token_S, logprob_S, raw_S = (
        np.empty(count, np.int64),
        np.empty(count, np.float32),
        np.empty(count, np.float32),
    )
    top_SK, top_logprobs_SK = (
        np.empty((count, depth), np.int64),
        np.empty((count, depth), np.float32),
    )
    sample_rows(
        rows_SV,
        edited_EV,
        edited_S,
        parameters,
        state_S,
        position_S,
        token_S,
        logprob_S,
        raw_S,
        top_SK,
        top_logprobs_SK,
    )
    token_S[left_out] = -1
    top: list[TokenLogprobs | None] = [None] * count
    if depth:
        for s in range(count):
            if states[state_S[s]].alternatives:
                top[s] = _alternatives(top_SK[s], top_logprobs_SK[s])
    return Sampled(token_S, logprob_S, raw_S if raw else None, top)


def prompt_logprobs(
    logits: torch.Tensor, targets: Sequence[int], count: int
) -> list[TokenLogprobs]:
    """Return for each row of `logits` (float32, [S, V]) the given token, then the `count` best
    tokens, which may include it, under the raw distribution.
    """
    rows_SV = np.ascontiguousarray(logits.detach().numpy())
    rows, depth = len(rows_SV), min(count, rows_SV.shape[1])
    target_S, logprob_S = np.array(targets, np.int64), np.empty(rows, np.float32)
    top_SK, top_logprobs_SK = np.empty((rows, depth), np.int64), np.empty((rows, depth), np.float32)
    score_targets(rows_SV, target_S, logprob_S, top_SK, top_logprobs_SK)
    best = [_alternatives(top_SK[s], top_logprobs_SK[s]) for s in range(rows)]
    return [
        TokenLogprobs(
            (int(target_S[s]), *best[s].token_ids), (float(logprob_S[s]), *best[s].logprobs)
        )
        for s in range(rows)
    ]


def _packed(sampling: Sampling, seed: int) -> bytes:
    """Return one PARAMETERS record as bytes, so that a step packs its sequences with one join."""
    record = np.zeros(1, PARAMETERS)
    for name in PARAMETERS.names or ():
        record[name] = np.uint64(seed) if name == "seed" else getattr(sampling, name)
    return record.tobytes()


def _edited(
    logits_SV: NDArray[np.float32],
    states: Sequence[SamplingState],
    state_S: NDArray[np.int64],
    position_S: NDArray[np.int64],
    path_SD: NDArray[np.int32],
) -> tuple[NDArray[np.float32], NDArray[np.int64], list[int]]:
    """Copy the rows that bias, penalties or masks change. Return the copies, each row's index into
    them (-1: the row itself), and the rows to leave out.
    """
    count, size = logits_SV.shape
    edited_S = np.full(count, -1, np.int64)
    if not any(state.edits or state.structure for state in states):
        return np.empty((0, size), np.float32), edited_S, []
    of_S = [states[state] for state in state_S]
    rows = [s for s in range(count) if of_S[s].structure or of_S[s].edits_at(int(position_S[s]))]
    edited_S[rows] = np.arange(len(rows))
    edited_EV = np.empty((len(rows), size), np.float32)
    path_SD = np.ascontiguousarray(path_SD, np.int32)
    left_out = [
        s
        for e, s in enumerate(rows)
        if not of_S[s].edit(logits_SV[s], int(position_S[s]), path_SD[s], edited_EV[e])
    ]
    return edited_EV, edited_S, left_out


def _alternatives(ids_K: NDArray[np.int64], logprobs_K: NDArray[np.float32]) -> TokenLogprobs:
    kept = int((ids_K >= 0).sum())
    return TokenLogprobs(tuple(ids_K[:kept].tolist()), tuple(logprobs_K[:kept].tolist()))
