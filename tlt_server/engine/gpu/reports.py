"""Raw log-probs and alternatives of a step's tokens: computed by the device after the step, read
with its outcome.

They influence no token, so a request that asks for them is sampled, speculated on and planned ahead
as any other, and a step without such a request pays nothing. The step's logits are read on the
stream that the next step is queued on, so before it overwrites them. How much there is to read
depends on the step, so it stays on the device until then: pinned memory is not allocated while
steps run.

Legend: A entries that ask, N tokens of an entry, K best tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tlt_server.engine.batch import Chunk, Emission
from tlt_server.engine.gpu.extend import Extend, Report
from tlt_server.engine.gpu.ring import PinnedRing
from tlt_server.records import TokenLogprobs

MIN_BEST = 16  # computed where any are asked for; then powers of two


class Reports(NamedTuple):
    asking: dict[int, int]  # entry -> its place in `values`
    values: Report

    def add_to(self, emission: Emission, entry: int, work: Chunk) -> None:
        """Add the values, which are in the host's memory, to this entry's emission."""
        if entry not in self.asking:
            return
        state = work.sequence.state
        raw_logprob_N, token_NK, logprob_NK = (
            values[self.asking[entry], : len(emission.tokens)] for values in self.values
        )
        if state.raw:
            emission.raw_logprobs = raw_logprob_N.tolist()
        if state.alternatives:
            best = zip(
                token_NK[:, : state.alternatives].tolist(),
                logprob_NK[:, : state.alternatives].tolist(),
                strict=True,
            )
            emission.top_logprobs = [_kept(token_ids, logprobs) for token_ids, logprobs in best]


class Reporter:
    def __init__(self, entries: PinnedRing, device: torch.device) -> None:
        """`entries` holds those of a step."""
        self._entries, self._device = entries, device
        # Reading runs in parallel with the steps.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def launch(self, extend: Extend, entries: Sequence[tuple[int, Chunk]]) -> Reports | None:
        """Report on what these entries of the pass just launched emit; None where none asks."""
        asked = {
            entry: work
            for entry, work in entries
            if work.samples and work.sequence.reports and not work.sequence.by_host
        }
        if not asked:
            return None
        best = best_of(max(work.sequence.state.alternatives for work in asked.values()))
        return Reports(
            {entry: a for a, entry in enumerate(asked)}, extend.report(self._upload([*asked]), best)
        )

    def rehearse(self, extend: Extend) -> None:
        """Compile the kernels, so that no request waits for a compiler."""
        extend.report(self._upload([0]), best_of(1))

    def read(self, reports: Reports) -> Reports:
        """Copy to the host's memory, once the step has passed."""
        with torch.cuda.stream(self._stream):
            return Reports(reports.asking, Report(*(values.cpu() for values in reports.values)))

    def _upload(self, entries: list[int]) -> Tensor:
        buffer = self._entries.take()
        buffer.array[: len(entries)] = entries
        entry_A = buffer.tensor[: len(entries)].to(self._device, non_blocking=True)
        buffer.mark()
        return entry_A


def best_of(alternatives: int) -> int:
    """Return how many are computed: few distinct numbers, so that their kernels are compiled."""
    return max(MIN_BEST, 1 << (alternatives - 1).bit_length()) if alternatives else 0


def _kept(token_ids: list[int], logprobs: list[float]) -> TokenLogprobs:
    count = token_ids.index(-1) if -1 in token_ids else len(token_ids)
    return TokenLogprobs(tuple(token_ids[:count]), tuple(logprobs[:count]))
