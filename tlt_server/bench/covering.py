"""Pairwise covering arrays: few configurations in which every pair of settings of any two factors
still meets.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence

Configuration = dict[str, object]


def pairs(configuration: Mapping[str, object]) -> set[tuple[tuple[str, object], ...]]:
    """Every pair of (factor, level) in one configuration."""
    return set(itertools.combinations(configuration.items(), 2))


def covering_array(factors: Mapping[str, Sequence[object]], seed: int) -> list[Configuration]:
    """Cover all pairs greedily and seeded: take, of 50 random configurations, the one that covers
    most uncovered pairs, until none is left.
    """
    draw = random.Random(seed)
    levels = [[(name, level) for level in choices] for name, choices in factors.items()]
    missing = {
        pair
        for one, other in itertools.combinations(levels, 2)
        for pair in itertools.product(one, other)
    }
    chosen: list[Configuration] = []
    while missing:
        must = dict(draw.choice(sorted(missing, key=repr)))
        tries = [
            {name: must.get(name, draw.choice(list(choices))) for name, choices in factors.items()}
            for _ in range(50)
        ]
        best = max(tries, key=lambda configuration: len(pairs(configuration) & missing))
        missing -= pairs(best)
        chosen.append(best)
    return chosen
