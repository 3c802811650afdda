"""Seeds: explicit ones are kept, choices differ, the server's own never repeat."""

from __future__ import annotations

import itertools

from tlt_client.fields import MAX_SEED
from tlt_server.wire.seeds import SeedSource, choice_seed


def test_choice_zero_uses_the_seed_itself():
    assert [choice_seed(seed, 0) for seed in (0, 7, MAX_SEED)] == [0, 7, MAX_SEED]


def test_choices_of_neighboring_seeds_never_share_a_seed():
    seeds = [choice_seed(seed, index) for seed, index in itertools.product(range(50), range(64))]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed <= MAX_SEED for seed in seeds)


def test_choice_seed_is_stable_between_releases():
    assert choice_seed(7, 1) == 0x9C9CC711BC005A5D


def test_seed_source_never_repeats_and_covers_the_high_bits():
    source = SeedSource(start=3)
    seeds = [source.next() for _ in range(10_000)]
    assert len(set(seeds)) == len(seeds)
    assert len({seed >> 56 for seed in seeds}) == 256


def test_seed_sources_differ_unless_given_the_same_start():
    first, second = SeedSource(), SeedSource()
    assert {first.next() for _ in range(100)}.isdisjoint({second.next() for _ in range(100)})
    assert [SeedSource(9).next() for _ in range(3)] == [SeedSource(9).next() for _ in range(3)]
    ours, theirs = SeedSource(9), SeedSource(9)
    assert [ours.next() for _ in range(5)] == [theirs.next() for _ in range(5)]
