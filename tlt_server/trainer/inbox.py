"""Takes what other servers recorded into the buffer, without the sequences that it has already.

A sequence is the same as another one where tokens, seed and weight versions are.
"""

from __future__ import annotations

from tlt_server.samples.inbox import Inbox
from tlt_server.samples.sample import Sample
from tlt_server.trainer.buffer import SampleBuffer

Fact = tuple[bytes, int, int, tuple[tuple[int, str], ...]]


def take_in(inbox: Inbox, buffer: SampleBuffer) -> int:
    """Take one file that waits; return how many of its sequences are new."""
    entries = [*inbox.take(buffer.header, buffer.refusals, buffer.bounds.longest)]
    if not entries:
        return 0
    known = {_fact(entry.sample) for entry in buffer}
    taken = 0
    for entry in entries:
        fact = _fact(entry.sample)
        if fact not in known:
            known.add(fact)
            taken += buffer.add(entry.sample)
    return taken


def _fact(sample: Sample) -> Fact:
    return sample.tokens, sample.prompt_len, sample.seed, tuple(sample.spans)
