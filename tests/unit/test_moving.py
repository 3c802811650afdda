"""Moving: no choice that a slow twin would not make, and none that it would still make."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.test_placing import asked, of, placer_of
from tlt_server.frontend.link.moving import COST_S, MAX_MOVES, REST_S, Move, Mover
from tlt_server.frontend.link.placing import PRIOR, PlacedSequence, Placer


def loaded(
    counts: list[int], *, max_running: int = 64, tokens: int = 50, started: bool = True
) -> Placer:
    """Return a placer with as many sequences at each replica, each `tokens` further on."""
    placer = placer_of(len(counts), max_running)
    for number, count in enumerate(counts):
        for i in range(count):
            placer.place(asked(f"{number}-{i}", max_tokens=20_000), among=[f"r{number:02}"])
            if started:
                placer.took(f"{number}-{i}", tokens)
    return placer


def apply(placer: Placer, moves: list[Move]) -> None:
    for move in moves:
        placer.place(
            asked(move.id, max_tokens=20_000), placer_tokens(placer, move.id), 0, [move.to]
        )
        placer.took(move.id, 1)
        placer.check()


def placer_tokens(placer: Placer, id: str) -> int:
    return placer.placed[id].tokens - 100


def reasons(moves: list[Move]) -> Counter[str]:
    return Counter(move.reason for move in moves)


# waiting sequences


def waiting(placer: Placer, name: str, count: int) -> None:
    placer.stepped(name, None, {"waiting": float(count), "running": 4.0})


def test_waiting_sequences_go_where_there_is_room() -> None:
    placer = loaded([9, 2], max_running=4, started=False)
    for i in range(4):
        placer.took(f"0-{i}", 1)
    waiting(placer, "r00", 5)
    moves = Mover(placer, balance=False).moves(0.0)
    assert moves == [Move("0-4", "r01", "waiting"), Move("0-5", "r01", "waiting")]


def test_waiting_sequences_stay_where_all_are_full() -> None:
    placer = loaded([9, 4], max_running=4, started=False)
    waiting(placer, "r00", 5)
    assert Mover(placer).moves(0.0) == []


def test_sequences_that_are_read_do_not_count_as_waiting() -> None:
    placer = loaded([4, 0], max_running=4, started=False)
    waiting(placer, "r00", 4)
    assert Mover(placer).moves(0.0) == []


def test_fixed_sequences_wait_where_they_are() -> None:
    placer = loaded([6, 2], max_running=4, started=False)
    waiting(placer, "r00", 2)
    [move] = Mover(placer, balance=False).moves(0.0, lambda id: id != "0-4")
    assert move.id == "0-5"


# balance


def test_gain_must_exceed_reading_again() -> None:
    assert Mover(loaded([20, 0])).moves(0.0)
    assert Mover(loaded([3, 3])).moves(0.0) == []
    assert Mover(loaded([20, 0], tokens=19_990)).moves(0.0) == []


def test_balance_can_be_off() -> None:
    assert Mover(loaded([20, 0]), balance=False).moves(0.0) == []


def test_moved_sequence_rests() -> None:
    placer = loaded([20, 0])
    mover = Mover(placer)
    moves = mover.moves(0.0)
    apply(placer, moves)
    moved = {move.id for move in moves}
    for id in [id for id, own in placer.placed.items() if id not in moved]:
        placer.ended(id)
    assert mover.moves(REST_S - 0.1) == []
    again = mover.moves(REST_S)
    assert again and {move.id for move in again} <= moved


def test_moves_at_once_are_bounded() -> None:
    assert len(Mover(loaded([300, 0], max_running=300)).moves(0.0)) == MAX_MOVES


COUNTS = st.lists(st.integers(0, 12), min_size=2, max_size=5)


def twin_token_s(count: float, tokens: float, places: int) -> float:
    turns = max(1.0, count / places)
    return turns * PRIOR.each + count * PRIOR.shared + tokens * PRIOR.context


def best_gain_s(placer: Placer, fixed: set[str]) -> float:
    """Return the largest gain of any one move to the replica with the fastest next token."""

    def there(name: str, further: int = 0, tokens: int = 0) -> float:
        own = [each for each in placer.placed.values() if each.load.name == name]
        places = placer.loads[name].places
        together = sum(each.tokens for each in own) + tokens
        return twin_token_s(len(own) + further, together, places)

    to = min(placer.loads, key=lambda name: (there(name, 1), name))
    gains = [
        each.expected * (there(each.load.name) - there(to, 1, each.tokens))
        - each.tokens * PRIOR.read
        - COST_S
        for id, each in placer.placed.items()
        if each.started and id not in fixed and each.load.name != to
    ]
    return max(gains, default=-math.inf)


@given(COUNTS, st.integers(1, 20_000), st.integers(2, 16), st.sets(st.integers(0, 4)))
@settings(max_examples=60, deadline=None)
def test_balance_ends_where_no_single_move_gains(
    counts: list[int], tokens: int, max_running: int, fixed_at: set[int]
) -> None:
    placer = loaded(counts, tokens=tokens, max_running=max_running)
    fixed = {id for id in placer.placed if int(id.split("-")[0]) in fixed_at}
    moves = Mover(placer).moves(0.0, lambda id: id not in fixed)
    assert reasons(moves).keys() <= {"balance"}
    assert not fixed & {move.id for move in moves}
    assert len({move.id for move in moves}) == len(moves)
    for move in moves:
        assert best_gain_s(placer, fixed) > 0.0
        fixed.add(move.id)
        placer.place(asked(move.id, max_tokens=20_000), tokens, 0, [move.to])
        placer.placed[move.id].started = True
        placer.placed[move.id].load.unread = 0
    assert best_gain_s(placer, fixed) <= 1e-9


# consolidation


@given(COUNTS, st.floats(0.005, 1.0))
@settings(max_examples=60, deadline=None)
def test_consolidation_keeps_the_fewest_replicas(counts: list[int], slower: float) -> None:
    placer = loaded(counts)
    total, size = sum(counts), len(counts)
    tokens = 150 * total
    even = twin_token_s(total / size, tokens / size, 64)
    fewest = next(
        few
        for few in range(1, size + 1)
        if few == size or twin_token_s(total / few, tokens / few, 64) <= (1 + slower) * even
    )
    moves = Mover(placer, balance=False, consolidate=slower).moves(0.0)
    assert reasons(moves).keys() <= {"consolidate"}
    apply(placer, moves)
    assert len(of(placer)) <= fewest
    assert sum(of(placer).values()) == total


def test_consolidation_leaves_replicas_it_cannot_empty() -> None:
    placer = loaded([3, 2, 1])
    moves = Mover(placer, balance=False, consolidate=1.0).moves(0.0, lambda id: id != "2-0")
    assert {move.id for move in moves} == {"1-0", "1-1"}


def test_balance_reads_the_figures_of_each_sequence_once(monkeypatch: pytest.MonkeyPatch) -> None:
    placer, read = loaded([500, 0, 0, 0], max_running=500), list[int]()
    expected = PlacedSequence.expected.fget
    assert expected is not None

    def counted(own: PlacedSequence) -> int:
        read.append(1)
        return int(expected(own))

    monkeypatch.setattr(PlacedSequence, "expected", property(counted))
    assert len(Mover(placer).moves(0.0)) == MAX_MOVES
    assert len(read) == 500


def test_nothing_is_looked_at_where_nothing_can_move() -> None:
    asked: list[str] = []
    mover = Mover(loaded([64, 0]), balance=False)
    assert not mover.moves(0.0, lambda id: not asked.append(id)) and not asked
