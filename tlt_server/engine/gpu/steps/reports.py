"""Raw log-probs and alternatives of a step's tokens, and log-probs of prompts: computed on the
device after the step, read with its outcome.

They influence no token: a request with reports is sampled, drafted for and planned ahead like any
other, and a step without one pays nothing. The step's logits and hidden states are read on the
stream of the next step, before it overwrites them. The size of a report depends on the step, so it
stays on the device until it is read: no pinned memory is allocated while steps run.

Legend: A entries with a report, N tokens of an entry, K best tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tlt_kernels.gpu.report import TokenScores
from tlt_server.engine.gpu.steps.extend import Extend, ExtendKey, Report, Reported
from tlt_server.engine.gpu.steps.ring import PinnedRing
from tlt_server.engine.gpu.steps.state import SCORED
from tlt_server.engine.schedule.batch import Chunk
from tlt_server.engine.schedule.sequence import Emission
from tlt_server.engine.schedule.sequence import Sequence as EngineSequence
from tlt_server.wire.records import TokenLogprobs

MIN_BEST = 16  # computed where any are asked for; then powers of two
# Reports with every kernel that a report launches, and passes of all kinds to report on.
REHEARSED = Reported(True, True, tuple((0, 1 << power) for power in range(SCORED.bit_length())))
REHEARSED_KEYS = (ExtendKey(1, 1), ExtendKey(1, 1, filtered=True), ExtendKey(1, 1, edited=True))


class PromptScores(NamedTuple):
    """Scores of the tokens at positions [first, first + tokens) of a prompt."""

    first: int
    tokens: int
    scores: TokenScores


class PromptPiece(NamedTuple):
    """Consecutive prompt tokens that are scored together."""

    row: int  # the one before the first token
    first: int
    tokens: int
    best: int


class Reports(NamedTuple):
    asking: dict[int, int]  # entry -> its place in `values`
    values: Report | None
    prompts: dict[int, list[PromptScores]]  # entry -> its pieces

    def add_to(self, emission: Emission, entry: int, work: Chunk) -> None:
        """Add this entry's values, already in host memory, to its emission."""
        if entry in self.prompts:
            emission.prompt_logprobs = [None] if work.start == 0 else []
            for piece in self.prompts[entry]:
                emission.prompt_logprobs += _scored(piece, work.sequence)
        if self.values is None or entry not in self.asking:
            return
        state = work.sequence.state
        raw_logprob_N, token_NK, logprob_NK = (
            values[self.asking[entry], : len(emission.tokens)] for values in self.values
        )
        if state.raw:
            emission.raw_logprobs = raw_logprob_N.tolist()
        if state.alternatives:
            emission.top_logprobs = _best(token_NK, logprob_NK, state.alternatives)


class AskedReports(NamedTuple):
    """The requested reports of a step, by entry."""

    tokens: dict[int, Chunk]
    raw: bool
    prompts: dict[int, list[PromptPiece]]  # none of a chunk that is a prompt's last token

    @classmethod
    def of(cls, entries: Sequence[tuple[int, Chunk]], decode_rows: int) -> AskedReports:
        """`decode_rows`: of the pass; prompt rows follow them."""
        tokens = {e: work for e, work in entries if work.samples and work.sequence.reports}
        raw = any(work.sequence.state.raw for work in tokens.values())
        prompts, row = dict[int, list[PromptPiece]](), decode_rows
        for entry, work in entries:
            sequence, count = work.sequence, work.sequence.request.sampling.prompt_logprobs
            if count is not None and sequence.scores_prompt and work.start < sequence.prompt_len:
                end = min(work.end, sequence.prompt_len - 1)
                prompts[entry] = [
                    PromptPiece(
                        row + at - work.start, at + 1, min(SCORED, end - at), best_of(count)
                    )
                    for at in range(work.start, end, SCORED)
                ]
            if not work.decodes:
                row += work.end - work.start
        return cls(tokens, raw, prompts)

    @property
    def reported(self) -> Reported:
        pieces = [piece for each in self.prompts.values() for piece in each]
        return Reported(
            bool(self.tokens), self.raw, tuple((piece.row, piece.tokens) for piece in pieces)
        )


class Reporter:
    def __init__(self, entries: PinnedRing, device: torch.device) -> None:
        """`entries`: the ring of the steps' entries."""
        self._entries, self._device = entries, device
        # Reading runs in parallel with the steps.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def launch(self, extend: Extend, asked: AskedReports) -> Reports | None:
        """Compute the reports of the pass just launched; None if no entry requests one."""
        tokens, values = asked.tokens, None
        if tokens:
            states = [work.sequence.state for work in tokens.values()]
            best = best_of(max(state.alternatives for state in states))
            values = extend.report(self._upload([*tokens]), best, raw=asked.raw)
        prompts = {
            entry: [
                PromptScores(
                    piece.first,
                    piece.tokens,
                    extend.score_prompt(piece.row, piece.tokens, piece.best),
                )
                for piece in pieces
            ]
            for entry, pieces in asked.prompts.items()
        }
        if not tokens and not prompts:
            return None
        extend.end_reports(asked.reported)
        return Reports({entry: a for a, entry in enumerate(tokens)}, values, prompts)

    def rehearse(self, extend: Extend) -> None:
        """Compile the kernels on all ranks, so that no request waits for a compiler."""
        extend.report(self._upload([0]), best_of(1), raw=REHEARSED.raw)
        for first, count in REHEARSED.prompts:
            extend.score_prompt(first, count, best_of(1))
        extend.end_reports(REHEARSED)

    def read(self, reports: Reports) -> Reports:
        """Copy the reports to host memory, after the step."""
        asking, values, prompts = reports
        with torch.cuda.stream(self._stream):
            return Reports(
                asking,
                Report(*(each.cpu() for each in values)) if values else None,
                {
                    entry: [
                        piece._replace(scores=TokenScores(*(each.cpu() for each in piece.scores)))
                        for piece in pieces
                    ]
                    for entry, pieces in prompts.items()
                },
            )

    def _upload(self, entries: list[int]) -> Tensor:
        buffer = self._entries.take()
        buffer.array[: len(entries)] = entries
        entry_A = buffer.tensor[: len(entries)].to(self._device, non_blocking=True)
        buffer.mark()
        return entry_A


def best_of(alternatives: int) -> int:
    """Return how many alternatives to compute: one of a few numbers, whose kernels are compiled."""
    return max(MIN_BEST, 1 << (alternatives - 1).bit_length()) if alternatives else 0


def _best(token_NK: Tensor, logprob_NK: Tensor, count: int) -> list[TokenLogprobs]:
    """Return up to `count` best tokens per token."""
    pairs = zip(token_NK[:, :count].tolist(), logprob_NK[:, :count].tolist(), strict=True)
    return [_kept(token_ids, logprobs) for token_ids, logprobs in pairs]


def _kept(token_ids: list[int], logprobs: list[float]) -> TokenLogprobs:
    count = token_ids.index(-1) if -1 in token_ids else len(token_ids)
    return TokenLogprobs(tuple(token_ids[:count]), tuple(logprobs[:count]))


def _scored(piece: PromptScores, sequence: EngineSequence) -> list[TokenLogprobs]:
    """Return for each token itself, then the best tokens, which may include it."""
    count = sequence.request.sampling.prompt_logprobs or 0
    logprob_N, token_NK, logprob_NK = (values[: piece.tokens] for values in piece.scores)
    targets = sequence.tokens[piece.first : piece.first + piece.tokens].tolist()
    best = _best(token_NK, logprob_NK, count)
    return [
        TokenLogprobs((target, *others.token_ids), (logprob, *others.logprobs))
        for target, logprob, others in zip(targets, logprob_N.tolist(), best, strict=True)
    ]
