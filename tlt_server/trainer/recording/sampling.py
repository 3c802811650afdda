"""One-step-off sampling: chooses the recorded sequences of the next training step.

Steps are the weight versions of the target, in order of arrival; the active one is the newest, even
after a rollback. Sequences of a step end in the order of their lengths, so a step in progress lacks
its long ones: until it has as many of a length as the step before had, the longest of that step
stand in. Strata are length (a power of two) x step and are drawn uniformly. Within a stratum, API
keys are drawn uniformly, and each of a key's sequences has the weight 1 + its accept failures. So a
flood from one key leaves the others their share.

Every output token of a sequence is a root to draft from in training, with equal weight. Replays
showed that this is best, with a weak drafter of the demo pair after 24 steps: accept lengths were
0.4 % shorter with weight 2 for the roots of the server's cycles and 3 for those whose drafts had
failed, and 4 % shorter with these roots alone.

A tenth of the prompts is held out, by a hash of their tokens, so no sibling of a held-out response
is ever trained on. The same buffer, seed and draw number give the same choice.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

import numpy as np
import xxhash

from tlt_server.samples.sample import Sample
from tlt_server.samples.segments import Recorded

HELD_OUT = 10  # prompts, of which one is held out


class Stratum(NamedTuple):
    step: int  # 0: the newest version's, 1: the one before
    length: int  # floor(log2) of the output's tokens


def held_out(sample: Sample) -> bool:
    """Return True if this sequence is for evaluation only, like all sequences of its prompt."""
    return xxhash.xxh3_64_intdigest(sample.prompt_key.to_bytes(8, "little")) % HELD_OUT == 0


def steps_of(entries: Iterable[Recorded], in_force: str) -> list[str]:
    """Return the versions of the target, newest first. Entries are in order of arrival."""
    versions = dict.fromkeys(version for e in entries for _, version in e.sample.spans)
    newest = [in_force] if in_force in versions else []
    return newest + [version for version in reversed(versions) if version != in_force]


def strata_of(entries: Sequence[Recorded], in_force: str) -> dict[Stratum, list[Recorded]]:
    """Return the sequences that may be trained on, by stratum."""
    step_of = {version: step for step, version in enumerate(steps_of(entries, in_force))}
    found: dict[Stratum, list[Recorded]] = defaultdict(list)
    for entry in entries:
        step = step_of[entry.sample.version]
        if step <= 1:
            found[Stratum(step, entry.sample.output_len.bit_length() - 1)].append(entry)
    before = sorted(s.length for s, those in found.items() if s.step == 1 for _ in those)
    middle = before[len(before) // 2] if before else 0
    kept: dict[Stratum, list[Recorded]] = {}
    for stratum, those in sorted(found.items()):
        longest = stratum.length >= middle
        lacking = len(found.get(Stratum(0, stratum.length), ())) < len(those)
        trained = [entry for entry in those if not held_out(entry.sample)]
        if trained and (stratum.step == 0 or (longest and lacking)):
            kept[stratum] = trained
    return kept


def weights_of(entries: Sequence[Recorded]) -> list[float]:
    """Return the probability of each sequence of one stratum; all keys together have equal
    probabilities.
    """
    total: Counter[str] = Counter()  # by key
    for entry in entries:
        total[entry.sample.owner] += 1 + entry.sample.failures
    return [
        (1 + entry.sample.failures) / total[entry.sample.owner] / len(total) for entry in entries
    ]


def draw(
    by_stratum: Mapping[Stratum, Sequence[Recorded]], count: int, seed: int, number: int
) -> list[Recorded]:
    """Return `count` sequences, with repetition, for step `number` of a training run; none if
    nothing may be trained on.
    """
    strata = [*by_stratum.values()]
    if not strata:
        return []
    generator = np.random.Generator(np.random.PCG64([seed, number]))
    chosen_D = generator.integers(len(strata), size=count)
    drawn: list[Recorded | None] = [None] * count
    for i, stratum in enumerate(strata):
        at = np.flatnonzero(chosen_D == i)
        picks = generator.choice(len(stratum), size=len(at), p=weights_of(stratum))
        for place, pick in zip(at.tolist(), picks.tolist(), strict=True):
            drawn[place] = stratum[pick]
    return [entry for entry in drawn if entry is not None]


def evaluated(entries: Sequence[Recorded], version: str) -> list[Recorded]:
    """Return the held-out sequences that this target version is known to have computed
    completely.
    """
    return [
        entry
        for entry in entries
        if held_out(entry.sample) and entry.sample.spans == [(0, version)]
    ]


def judging(entries: Iterable[Recorded], most: int) -> list[list[Recorded]]:
    """Return the sequences of at most `most` prompts, by prompt. The newest prompts of all keys
    alternate, so no key decides alone. Entries are in order of arrival.
    """
    by_owner: dict[str, dict[int, list[Recorded]]] = defaultdict(lambda: defaultdict(list))
    for entry in entries:
        by_owner[entry.sample.owner][entry.sample.prompt_key].append(entry)
    newest_first = [[*reversed(groups.values())] for groups in by_owner.values()]
    turns = zip_longest(*newest_first)
    return [group for turn in turns for group in turn if group is not None][:most]
