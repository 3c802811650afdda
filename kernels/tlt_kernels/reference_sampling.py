"""Slow twins of the sampling kernels: plain numpy, one idea per line, no code shared with the fast ones.

Legend: S rows, V vocabulary. Arithmetic that decides a token is float32 in both; sums here are float64.
"""

from __future__ import annotations

import numpy as np

MASK = np.uint64(0xFFFFFFFF)


def philox4x32(key: tuple[int, int], counter: tuple[np.ndarray | int, ...]) -> list[np.ndarray]:
    """Philox-4x32-10 on arrays of counters, in uint64 arithmetic: the four words, each as uint64 below 2^32."""
    c = [np.asarray(word, dtype=np.uint64) & MASK for word in counter]
    k = [key[0], key[1]]
    for _ in range(10):
        left, right = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = [
            (right >> np.uint64(32)) ^ c[1] ^ np.uint64(k[0]),
            right & MASK,
            (left >> np.uint64(32)) ^ c[3] ^ np.uint64(k[1]),
            left & MASK,
        ]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


def gumbel(seed: int, tokens: np.ndarray, position: int) -> np.ndarray:
    """G(seed, token, position) for an array of token ids: float64 throughout, rounded to float32 at the end."""
    tokens = np.asarray(tokens, dtype=np.int64)
    words = np.stack(philox4x32((seed % 2**32, seed >> 32), (tokens >> 2, position, 0, 0)))
    words = np.broadcast_to(words.reshape(4, -1) if words.ndim > 1 else words[:, None], (4, tokens.size))
    x = words[tokens.ravel() & 3, np.arange(tokens.size)].astype(np.float64)
    u = np.minimum((x + 0.5) * 2.0**-32, 1.0 - 2.0**-24)
    return (-np.log(-np.log1p(-u))).astype(np.float32).reshape(tokens.shape)
