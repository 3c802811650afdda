"""Seeds of choices. The noise of a token is keyed by (seed, position), so two sequences with one
seed share their noise.

The frontend calls this when it turns a call into requests. Choice 0 uses an explicit seed
unchanged, and the others hash it with their index; a request without one gets the server's next,
never anything derived from a client's id.
"""

from __future__ import annotations

import hashlib
import itertools
import secrets

from tlt_client.fields import MAX_SEED

GOLDEN = 0x9E3779B97F4A7C15  # odd, so counter * GOLDEN visits every 64-bit value before it repeats


def choice_seed(seed: int, index: int) -> int:
    """Return the seed of choice `index` of a request with this seed: the seed itself for 0, else 64
    bits of
    BLAKE2b(seed, index).
    """
    if index == 0:
        return seed
    material = seed.to_bytes(8, "little") + index.to_bytes(8, "little")
    return int.from_bytes(
        hashlib.blake2b(material, digest_size=8, person=b"tlt-choice").digest(), "little"
    )


class SeedSource:
    """Seeds for requests without one: distinct for 2^64 calls of one server, unrelated between
    servers.
    """

    def __init__(self, start: int | None = None) -> None:
        """`start`: 64 bits; random when not given."""
        self._start = secrets.randbits(64) if start is None else start
        self._counter = itertools.count()

    def next(self) -> int:
        """Return the next seed. Safe to call from several threads."""
        return _mixed((self._start + next(self._counter) * GOLDEN) & MAX_SEED)


def _mixed(x: int) -> int:
    """SplitMix64's finaliser (Steele et al. 2014): a bijection of 64 bits, so distinct counters
    stay distinct.
    """
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MAX_SEED
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MAX_SEED
    return x ^ (x >> 31)
