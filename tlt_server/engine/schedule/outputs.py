"""Outputs of a step for its requests: the tokens that count, and the request's end if it has one.
Those of a patient request are gathered into chunks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import NamedTuple

from tlt_server.engine.schedule.sequence import Emission, Sequence
from tlt_server.errors import TltError
from tlt_server.wire.records import CHUNK_S, CHUNK_TOKENS, StepOutput


class End(NamedTuple):
    finish_reason: str
    stop_token: int | None = None
    error: TltError | None = None


def truncate(emission: Emission, stop_ids: Collection[int], remaining: int) -> End | None:
    """Cut the emission after its first stop token, or at `remaining` tokens. Return the sequence's
    finish, or None if it continues.
    """
    stopped = next(
        (i for i, token in enumerate(emission.tokens[:remaining]) if token in stop_ids), None
    )
    if stopped is None and len(emission.tokens) < remaining:
        return None
    kept = remaining if stopped is None else stopped + 1
    for values in (
        emission.tokens,
        emission.logprobs,
        emission.raw_logprobs,
        emission.top_logprobs,
    ):
        if values is not None:
            del values[kept:]
    return End("length") if stopped is None else End("stop", emission.tokens[stopped])


def output(sequence: Sequence, emission: Emission, end: End | None = None) -> StepOutput:
    """Return the output for tokens that the sequence already has. Prompt log-probs are sent
    once.
    """
    first = sequence.output_len == len(emission.tokens)
    prompt_logprobs, sequence.prompt_logprobs = sequence.prompt_logprobs, None
    return StepOutput(
        id=sequence.id,
        token_ids=emission.tokens,
        logprobs=emission.logprobs,
        raw_logprobs=emission.raw_logprobs,
        top_logprobs=emission.top_logprobs,
        prompt_logprobs=prompt_logprobs,
        cached_tokens=(sequence.cached_tokens or 0) if first else 0,
        queued_s=(sequence.queued_s or 0.0) if first else 0.0,
        finish_reason=end.finish_reason if end else None,
        stop_reason=end.stop_token if end else None,
        error=(end.error.code, end.error.message) if end and end.error else None,
        weight_version=emission.weight_version,
        drafted=emission.drafted,
        accepted=emission.accepted,
        steps=emission.steps,
        accepted_each=emission.accepted_each,
        draft_tokens=emission.draft_tokens,
    )


class Chunks:
    """The outputs of patient sequences that have not gone out yet: after the first, which goes out
    at once, they wait for `CHUNK_TOKENS` tokens, `CHUNK_S`, their sequence's end or another weight
    version. Also counts the times between outputs, which no reader of chunks could measure.
    """

    def __init__(self) -> None:
        self.now_s = 0.0  # when the last commit or check of deadlines began
        # sequences by (seconds since their tokens before, tokens)
        self.gaps = Counter[tuple[float, int]]()
        self._held: dict[Sequence, tuple[float, Emission]] = {}  # by age

    def note(self, sequence: Sequence, tokens: int) -> None:
        """Count the time since the sequence's tokens before."""
        if sequence.emitted_s:
            self.gaps[self.now_s - sequence.emitted_s, tokens] += 1
        sequence.emitted_s = self.now_s

    def add(self, sequence: Sequence, emission: Emission) -> StepOutput | None:
        """Return the output that is due with this result; None while its tokens are held."""
        request, tokens = sequence.request, len(emission.tokens)
        first = sequence.output_len - tokens == len(request.generated)
        # Alternatives are many values: a chunk of them would hold up who decodes it.
        if first or not request.patient or emission.top_logprobs:
            return output(sequence, emission)
        since_s, chunk = self._held.setdefault(sequence, (self.now_s, Emission(steps=0)))
        chunk.extend(emission)
        if len(chunk.tokens) < CHUNK_TOKENS and self.now_s - since_s < CHUNK_S:
            return None
        del self._held[sequence]
        return output(sequence, chunk)

    def take(self, sequence: Sequence, last: Emission) -> Emission:
        """Return what is held of a sequence and its last result together."""
        if (held := self._held.pop(sequence, None)) is None:
            return last
        _, chunk = held
        chunk.extend(last)
        return chunk

    def overdue(self) -> list[StepOutput]:
        """Return the chunks of sequences that got no tokens in time to send them."""
        return self._release(self.now_s - CHUNK_S)

    def flush(self) -> list[StepOutput]:
        """Return all chunks."""
        return self._release(self.now_s)

    def _release(self, until_s: float) -> list[StepOutput]:
        """Return the chunks that began by this time."""
        found: list[StepOutput] = []
        while self._held:
            sequence, (since_s, chunk) = next(iter(self._held.items()))
            if since_s > until_s:
                break
            del self._held[sequence]
            found.append(output(sequence, chunk))
        return found

    def check(self, open: Collection[Sequence]) -> None:
        """Assert every invariant."""
        assert self._held.keys() <= {*open}, "tokens are held of a sequence that has ended"
        ages = [since_s for since_s, _ in self._held.values()]
        assert ages == sorted(ages), "chunks are not in order of age"
