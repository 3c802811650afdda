"""The part of a drafter that a rank has: shared where heads, leaves and draft tokens allow it and
where it pays, or by a setting.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.test_gpu_memory import CONFIG, settings
from tlt_server.engine.gpu.memory.budget import Needs, kv_slot_values
from tlt_server.errors import StartupError
from tlt_server.models.draft_networks import EAGLE1, EAGLE3
from tlt_server.models.gpu.draft_part import DrafterPart, drafter_part
from tlt_server.models.split import Split
from tlt_server.settings.server import DrafterParallel

EAGLE = replace(CONFIG, architecture=EAGLE3, layers=1)
WIDE = replace(EAGLE, hidden_size=4096, intermediate_size=14336, heads=32, kv_heads=8)
SMALL = replace(EAGLE, hidden_size=256, intermediate_size=512, heads=2, kv_heads=1)


def part(
    ranks: int, asked: DrafterParallel = "auto", *, leaves: int = 8, rank: int = 0, drafter=EAGLE
) -> DrafterPart:
    return drafter_part(drafter, 32_000, Split(leaves, rank, ranks), asked, 2)


def test_drafter_is_split_at_every_width_that_divides_its_heads() -> None:
    assert [part(ranks).split.of for ranks in (1, 2, 4, 8)] == [1, 2, 4, 1], "28 heads"
    assert [part(ranks, drafter=WIDE).split.of for ranks in (1, 2, 4, 8)] == [1, 2, 4, 8]
    last = part(4, rank=3)
    assert (last.layer.heads, last.layer.kv_heads, last.tokens) == (7, 1, slice(24_000, 32_000))
    assert last.most_tokens == 8000


def test_drafter_uses_the_targets_leaves_unless_a_head_is_cut() -> None:
    for leaves, own in ((1, 2), (2, 2), (4, 4), (8, 4)):
        widths = [width for width in (1, 2, 4, 8) if width <= leaves]
        assert {part(width, leaves=leaves).split.leaves for width in widths} == {own}


def test_drafter_stays_whole_if_small_or_set_to_replicated() -> None:
    whole = part(2, "replicated")
    assert whole.split == Split(4) and whole.layer == EAGLE and whole.tokens == slice(0, 32_000)
    assert part(2, drafter=SMALL).split.of == 1
    assert part(2, "shared", drafter=SMALL).split.of == 2


@pytest.mark.parametrize(
    "drafter, ranks",
    [(EAGLE, 8), (replace(EAGLE, architecture=EAGLE1), 2), (replace(EAGLE, kv_heads=7), 2)],
)
def test_unsplittable_drafter_stays_whole_or_is_refused(drafter, ranks: int) -> None:
    assert part(ranks, drafter=drafter).split.of == 1
    with pytest.raises(StartupError, match="28 heads of 128.* use auto or replicated"):
        part(ranks, "shared", drafter=drafter)


def test_memory_plan_counts_a_ranks_part_of_the_drafter() -> None:
    class Drafter:
        config, draft_vocab_size, kv_layers = EAGLE, 32_000, 1

    given, own = settings(tensor_parallel=2), part(2)
    whole, mine = (Needs.of(given, CONFIG, Drafter(), 0, 0, each) for each in (None, own))  # type: ignore[arg-type]
    assert mine.per_drafted == 4 * own.most_tokens == whole.per_drafted // 2
    half = given.page_size * kv_slot_values(EAGLE, 1) // 2
    assert whole.per_page - mine.per_page == 2 * half
