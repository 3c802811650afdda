"""Keyed Gumbel noise (Philox-4x32-10) in plain PyTorch, for sampling and for drawing the
shared-noise tree in the evaluation.

Noise of token v at position t under seed s: key = s, counter = (v >> 2, t, 0, 0), word = v & 3.
Position = index in prompt + output.
"""

from __future__ import annotations

import torch

MASK = 0xFFFFFFFF


def philox_4x32(
    counters: list[torch.Tensor], key_low: torch.Tensor, key_high: torch.Tensor
) -> list[torch.Tensor]:
    """Ten rounds over four int64 tensors holding 32-bit words. The wrapped int64 product has the
    bits of the unsigned one.
    """
    c0, c1, c2, c3 = counters
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (
            ((p1 >> 32) & MASK) ^ c1 ^ key_low,
            p1 & MASK,
            ((p0 >> 32) & MASK) ^ c3 ^ key_high,
            p0 & MASK,
        )
        key_low, key_high = (key_low + 0x9E3779B9) & MASK, (key_high + 0xBB67AE85) & MASK
    return [c0, c1, c2, c3]


def gumbel(seeds_R: torch.Tensor, positions_R: torch.Tensor, vocab: int) -> torch.Tensor:
    """Noise [R, vocab] float32 for rows of int64 (seed, position); `vocab` is a multiple of 4."""
    zeros = torch.zeros((len(seeds_R), vocab // 4), dtype=torch.int64, device=seeds_R.device)
    blocks = torch.arange(vocab // 4, device=seeds_R.device)[None] + zeros
    words = philox_4x32(
        [blocks, positions_R[:, None] + zeros, zeros, zeros],
        (seeds_R & MASK)[:, None],
        ((seeds_R >> 32) & MASK)[:, None],
    )
    uniform = (torch.stack(words, dim=-1).reshape(len(seeds_R), vocab).float() + 0.5) * 2.0**-32
    return -torch.log(-torch.log1p(-uniform.clamp(max=1 - 2.0**-24)))
