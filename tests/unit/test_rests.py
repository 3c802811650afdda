"""Keys that rest after deaths of the engine, and deaths that end no server."""

from __future__ import annotations

import pytest

from tlt_server.errors import Unavailable
from tlt_server.frontend.link.supervisor import Backoff
from tlt_server.frontend.link.suspects import FIRST_S, KEYS, MAX_S, Rests


def left_s(rests: Rests, owner: str, now_s: float) -> float:
    try:
        rests.check(owner, now_s)
    except Unavailable as error:
        assert error.retry_after_s is not None
        return error.retry_after_s
    return 0.0


def test_a_rest_begins_at_the_second_death_and_doubles() -> None:
    rests, now_s, found = Rests(window_s=300.0), 0.0, list[float]()
    for _ in range(10):
        rests.died("a", now_s)
        found.append(left_s(rests, "a", now_s))
        assert left_s(rests, "b", now_s) == left_s(rests, "", now_s) == 0.0
        now_s += found[-1] + 299.0  # the next one comes within the window after the rest
        assert left_s(rests, "a", now_s) == 0.0
    assert found[:4] == [0.0, FIRST_S, 2 * FIRST_S, 4 * FIRST_S] and found[-2:] == [MAX_S] * 2


def test_deaths_that_are_far_apart_rest_no_key() -> None:
    rests = Rests(window_s=300.0)
    for i in range(5):
        rests.died("a", 301.0 * i)
        assert left_s(rests, "a", 301.0 * i) == 0.0


def test_without_keys_none_rests_and_memory_is_bounded() -> None:
    rests = Rests(window_s=300.0)
    for _ in range(5):
        rests.died("", 0.0)
    assert left_s(rests, "", 0.0) == 0.0
    for i in range(KEYS + 5):
        rests.died(f"k{i}", 0.0)
        rests.died(f"k{i}", 0.0)
    assert not left_s(rests, "k0", 0.0) and left_s(rests, f"k{KEYS + 4}", 0.0)


@pytest.mark.parametrize(
    ("owners", "ends"),
    [
        (["a"] * 20, None),
        (["a", "b"] * 10, None),
        (["a", "b", "c", "d"], 3),  # one each: none is known to be the cause
        ([""] * 4, 3),
        (["", "a", "", "a", "", "a", ""], 6),
    ],
)
def test_deaths_by_keys_that_rest_end_no_server(owners: list[str], ends: int | None) -> None:
    backoff = Backoff(3, window_s=300.0)
    delays = [backoff.death(float(i), owner=owner) for i, owner in enumerate(owners)]
    assert (delays.index(None) if None in delays else None) == ends
