"""Outputs of a step for its requests: the tokens that count, and the request's end if it has
one.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from tlt_server.engine.schedule.sequence import Emission, Sequence
from tlt_server.errors import TltError
from tlt_server.wire.records import StepOutput


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
    )
