"""Slow twins of the sampling kernels: plain numpy, one idea per line, no code shared with the fast
kernels.

Legend: S rows, V vocabulary. Arithmetic that decides a token is float32 in both; sums here are
float64.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tlt_kernels.filters import Filters

MASK = np.uint64(0xFFFFFFFF)


def philox4x32(key: tuple[int, int], counter: tuple[np.ndarray | int, ...]) -> list[np.ndarray]:
    """Return the four words of Philox-4x32-10 on arrays of counters, in uint64 arithmetic, each a
    uint64 below 2^32.
    """
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
    """Return G(seed, token, position) for an array of token ids: float64 throughout, rounded to
    float32 at the end.
    """
    tokens = np.asarray(tokens, dtype=np.int64)
    words = np.stack(philox4x32((seed % 2**32, seed >> 32), (tokens >> 2, position, 0, 0)))
    words = np.broadcast_to(
        words.reshape(4, -1) if words.ndim > 1 else words[:, None], (4, tokens.size)
    )
    x = words[tokens.ravel() & 3, np.arange(tokens.size)].astype(np.float64)
    u = np.minimum((x + 0.5) * 2.0**-32, 1.0 - 2.0**-24)
    return (-np.log(-np.log1p(-u))).astype(np.float32).reshape(tokens.shape)


def edited(
    logits: np.ndarray,
    bias: dict[int, float],
    prompt: list[int],
    output: list[int],
    repetition: float,
    presence: float,
    frequency: float,
    masked: list[int],
    allowed: Sequence[int] = (),
) -> np.ndarray:
    """Apply bias, then the repetition penalty, then presence and frequency, then the mask and what
    is allowed (empty: all), one token at a time in float32.
    """
    result = logits.astype(np.float32).copy()
    for token, value in bias.items():
        result[token] = result[token] + np.float32(value)
    for token in sorted({*prompt, *output}):
        x = result[token]
        x = x / np.float32(repetition) if x > 0 else x * np.float32(repetition)
        if token in output:
            x = x - (np.float32(frequency) * np.float32(output.count(token)) + np.float32(presence))
        result[token] = x
    result[masked] = -np.inf
    if allowed:
        result[[token for token in range(len(result)) if token not in allowed]] = -np.inf
    return result


def log_softmax(z: np.ndarray) -> np.ndarray:
    """Return float64 log-probs; -inf stays -inf."""
    shifted = z.astype(np.float64) - np.float64(z.max())
    return shifted - np.log(np.exp(shifted).sum())


def sample(
    logits: np.ndarray, temperature: float, filters: Filters, noise: np.ndarray
) -> tuple[int, np.ndarray, float]:
    """Sample one row: return the token, the float64 log-probs of the processed distribution, and
    the distance that `Filters.kept` returns. Temperature 0 is greedy.
    """
    if temperature == 0:
        return int(np.argmax(logits)), log_softmax(logits), np.inf
    z = logits / np.float32(temperature)
    keep, distance = filters.kept(z)
    z = np.where(keep, z, np.float32(-np.inf))
    return int(np.argmax(z + noise)), log_softmax(z), distance
