"""Samples to keep: sequences with drafted cycles that fit each other."""

from __future__ import annotations

import numpy as np

from tlt_server.samples.sample import HowDrafted, Sample, cycles_of
from tlt_server.wire.records import Strategy

VOCAB = 100
EAGLE = Strategy("eagle", 3, 1)


def sample(
    prompt: int,
    seed: int = 0,
    *,
    owner: str = "",
    version: str = "v0",
    output: int = 8,
    accepted: int = 1,
) -> Sample:
    """Return a response of `output` tokens, whose cycles accept this number of drafts each."""
    tokens = np.random.default_rng([prompt, 7]).integers(0, VOCAB, 4)
    text = np.random.default_rng([prompt, seed]).integers(0, VOCAB, output)
    roots = range(4, 4 + output - accepted - 1, accepted + 1)
    noted = [n for root in roots for n in (root, 4, 4, accepted, accepted, 0)]
    return Sample(
        tokens=np.concatenate([tokens, text]).astype("<i4").tobytes(),
        prompt_len=4,
        group=f"g{prompt}",
        owner=owner,
        seed=seed,
        temperature=1.0,
        top_p=1.0,
        min_p=0.0,
        top_k=0,
        max_tokens=output,
        end="length",
        spans=[(0, version)],
        **cycles_of(noted, [HowDrafted(EAGLE, "d0")]),
    )
