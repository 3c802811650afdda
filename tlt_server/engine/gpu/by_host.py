"""The host's part of a GPU step's sampling: penalties, biases and masks, which edit logits, and
prompt log-probs.

An edit follows from the text so far (counts over the vocabulary, tokens not allowed yet) or is a
list of any length, none of which the device keeps. The rows' logits come up, the CPU sampler takes
them as it does on a CPU, and its tokens go down before the walk. Such a request is never speculated
on and never decodes ahead of the host, so its row is the root alone and all its state is known
here; its raw log-probs and alternatives are the CPU sampler's, too. Prompt log-probs are of rows
that no step samples, all of them once per request, so they have no place in a captured pass; the
request's own tokens are the device's.

Legend: S samples, V vocabulary, B batch bucket.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tlt_kernels.gpu.tensors import Samples
from tlt_server.engine.batch import Chunk, Emission
from tlt_server.engine.gpu.extend import Extend
from tlt_server.engine.sampling import prompt_logprobs, sample
from tlt_server.models import Forward
from tlt_server.records import TokenLogprobs


@dataclass
class HostSampling:
    """The values that the device's outcome of an entry lacks."""

    raw_logprob: float | None = None
    top: TokenLogprobs | None = None
    prompt: list[TokenLogprobs | None] | None = None

    def add_to(self, emission: Emission) -> None:
        if emission.tokens and self.raw_logprob is not None:
            emission.raw_logprobs = [self.raw_logprob]
        if emission.tokens and self.top is not None:
            emission.top_logprobs = [self.top]
        emission.prompt_logprobs = self.prompt


def sample_by_host(
    extend: Extend, hosted: Mapping[int, Chunk], prompts: Sequence[Chunk]
) -> dict[int, HostSampling]:
    """Run the pass with the host's samples for the entries of `hosted`; waits for the device."""
    forwarded = extend.forward()
    scored: dict[int, list[TokenLogprobs | None]] = {}
    row = extend.key.decode_rows
    for w, work in enumerate(prompts):
        if (
            work.sequence.request.sampling.prompt_logprobs is not None
            and work.sequence.output_len == 0
        ):
            scored[extend.key.batch + w] = _score(extend, forwarded, work, row)
        row += work.end - work.start
    logits_SV = extend.logits(forwarded)
    sampled = extend.sample(logits_SV)
    found = _sample(extend, logits_SV, sampled, hosted) if hosted else {}
    for entry, prompt in scored.items():
        found.setdefault(entry, HostSampling()).prompt = prompt
    extend.finish(forwarded, sampled)
    return found


def _sample(
    extend: Extend, logits_SV: torch.Tensor, into: Samples, hosted: Mapping[int, Chunk]
) -> dict[int, HostSampling]:
    """Replace the device's samples in `into`."""
    batch, decode_rows = extend.key.batch, extend.key.decode_rows
    root_E = extend.trees.root_E.tolist()  # a decoding entry's row is also its sample
    samples = [root_E[entry] if entry < batch else decode_rows + entry - batch for entry in hosted]
    index_S = torch.tensor(samples, dtype=torch.int64, device=logits_SV.device)
    sequences = [work.sequence for work in hosted.values()]
    position_S = np.array([sequence.length for sequence in sequences], np.int64)
    of_S, path_SD = np.arange(len(samples)), np.zeros((len(samples), 0), np.int32)
    sampled = sample(
        logits_SV[index_S].cpu(),
        [sequence.state for sequence in sequences],
        of_S,
        position_S,
        path_SD,
    )
    into.token_S[index_S] = torch.from_numpy(sampled.token_S).to(into.token_S)
    into.logprob_S[index_S] = torch.from_numpy(sampled.logprob_S).to(into.logprob_S)
    raw_S = sampled.raw_logprob_S.tolist() if sampled.raw_logprob_S is not None else []
    return {
        entry: HostSampling(raw_S[s] if sequence.state.raw else None, sampled.top[s])
        for s, (entry, sequence) in enumerate(zip(hosted, sequences, strict=True))
    }


def _score(
    extend: Extend, forwarded: Forward, work: Chunk, first_row: int
) -> list[TokenLogprobs | None]:
    """Return the log-probs of the prompt tokens after the chunk's rows (row p gives those of
    position p + 1), in pieces that fit the buffer of the step's logits, which are not computed yet.
    """
    sequence, count = work.sequence, work.sequence.request.sampling.prompt_logprobs
    assert count is not None
    found: list[TokenLogprobs | None] = [None] if work.start == 0 else []
    room_SV, end = extend.state.logits_SV, min(work.end, sequence.prompt_len - 1)
    for start in range(work.start, end, len(room_SV)):
        rows, first = min(len(room_SV), end - start), first_row + start - work.start
        logits_SV = extend.state.model.logits(
            forwarded.hidden_RH[first : first + rows], room_SV[:rows]
        )
        found += prompt_logprobs(
            logits_SV.cpu(), sequence.tokens[start + 1 : start + 1 + rows].tolist(), count
        )
    return found
