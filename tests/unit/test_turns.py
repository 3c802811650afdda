"""Deficit round robin against its textbook form, and its bound of fairness under random work."""

from __future__ import annotations

from collections import Counter, deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tlt_server.process.turns import Turns

QUANTUM, DEAREST = 10, 25


def serve(turns: Turns, work: dict[str, deque[int]]) -> tuple[str, int]:
    """Serve the next one in turn; an owner whose work is done leaves."""
    owner = next(turns.order())
    cost = work[owner].popleft()
    turns.charge(owner, cost)
    if not work[owner]:
        turns.leave(owner)
    turns.check()
    return owner, cost


def textbook(work: dict[str, deque[int]]) -> list[tuple[str, int]]:
    """Serve all of `work` in rounds: each owner in turn gets a quantum, and is served while it has
    credit. One that is left alone pays nothing.
    """
    served, credit = [], dict.fromkeys(work, 0)
    while work:
        for owner in list(work):
            credit[owner] += QUANTUM
            while credit[owner] > 0 and work[owner]:
                served.append((owner, work[owner].popleft()))
                if len(work) > 1:
                    credit[owner] -= served[-1][1]
            if not work[owner]:
                del work[owner]
    return served


costs = st.lists(st.integers(1, DEAREST), min_size=1, max_size=30)
works = st.dictionaries(st.sampled_from("abcde"), costs, min_size=1)


@given(works)
def test_turn_order_equals_the_textbook_algorithm(work: dict[str, list[int]]) -> None:
    turns, left = Turns(QUANTUM), {owner: deque(each) for owner, each in work.items()}
    for owner in left:
        turns.wait(owner)
    served = [serve(turns, left) for _ in range(sum(map(len, work.values())))]
    assert served == textbook({owner: deque(each) for owner, each in work.items()})
    assert not len(turns)


@pytest.mark.slow
@settings(max_examples=200)
@given(st.lists(st.tuples(st.sampled_from("abcd"), costs), max_size=8), st.data())
def test_waiting_tenants_get_equal_service_within_a_bound(
    arriving: list[tuple[str, list[int]]], data: st.DataObject
) -> None:
    turns, work, got = Turns(QUANTUM), dict[str, deque[int]](), Counter[str]()
    since: dict[frozenset[str], tuple[int, int]] = {}  # both wait from then on, with these sums
    while arriving or any(work.values()):
        if arriving and (not any(work.values()) or data.draw(st.booleans())):
            owner, items = arriving.pop()
            work.setdefault(owner, deque()).extend(items)
            turns.wait(owner)
        else:
            owner, cost = serve(turns, work)
            got[owner] += cost
        waiting = [owner for owner in work if work[owner]]
        assert len(turns) == len(waiting) and all(owner in turns for owner in waiting)
        pairs = {frozenset((a, b)) for a in waiting for b in waiting if a != b}
        since = {pair: since[pair] for pair in since.keys() & pairs}
        for pair in pairs:
            a, b = sorted(pair)
            before = since.setdefault(pair, (got[a], got[b]))
            apart = abs((got[a] - before[0]) - (got[b] - before[1]))
            assert apart < QUANTUM + 2 * DEAREST, "the bound, from any moment on"


def test_greedy_owner_keeps_its_debt_after_leaving() -> None:
    turns, got = Turns(QUANTUM), Counter[str]()
    turns.wait("small")
    for _ in range(100):
        turns.wait("greedy")
        owner = next(turns.order())
        got[owner] += DEAREST if owner == "greedy" else 1
        turns.charge(owner, DEAREST if owner == "greedy" else 1)
        turns.leave("greedy")
    assert got["greedy"] <= got["small"] + QUANTUM + DEAREST


def test_uncontended_use_is_not_charged() -> None:
    turns = Turns(QUANTUM)
    turns.wait("a")
    turns.charge("a", 10**6)
    turns.wait("b")
    assert list(turns.order()) == ["a", "b"]


def test_owners_without_debt_are_forgotten() -> None:
    turns = Turns(QUANTUM)
    turns.wait("stays")
    for i in range(1000):
        turns.wait(f"{i}")
        turns.leave(f"{i}")
    assert list(turns.order()) == ["stays"] and len(turns._credit) == 1
