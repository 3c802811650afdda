"""Placing: the choice of a slow twin that counts everything again, and sums that return to zero."""

from __future__ import annotations

import math
import time
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tlt_server.frontend.link import placing
from tlt_server.frontend.link.placing import PRIOR, UNKNOWN_SHARE, WAIT, Pace, Placer, Speed
from tlt_server.wire.records import OFF, Cycle, GenerateRequest, Sampling, StepContext


def asked(
    id: object, prompt: int = 100, max_tokens: int = 1000, session: object = "", **fields: Any
) -> GenerateRequest:
    return GenerateRequest(
        id=str(id),
        token_ids=[1] * prompt,
        sampling=Sampling(max_tokens=max_tokens),
        seed=0,
        group_id=str(session or id),
        **fields,
    )


def placer_of(count: int, max_running: int = 64) -> Placer:
    placer = Placer()
    for number in range(count):
        placer.add(f"r{number:02}", max_running)
    return placer


def cycle(
    speed: Speed, decoding: int, prompt_rows: int = 0, steps: int = 1, context: float = 10.0
) -> Cycle:
    """Return the sum of steps of a replica with this speed, each with a token per sequence."""
    emitted = decoding * steps
    alone_s = steps * speed.each if decoding else 0.0
    seconds = alone_s + emitted * (speed.shared + context * speed.context)
    seconds += prompt_rows * speed.read
    return Cycle(
        context=StepContext(decoding, prompt_rows, context, 0),
        strategy=OFF,
        rows=decoding,
        emitted=emitted,
        accepted=(),
        drafted=0,
        step_s=seconds,
    )


def of(placer: Placer) -> Counter[str]:
    return Counter(placed.load.name for placed in placer.placed.values())


# what is chosen


def test_siblings_of_a_short_prompt_spread() -> None:
    placer = placer_of(4)
    for i in range(16):
        placer.place(asked(i, prompt=300, session="g"))
    assert set(of(placer).values()) == {4}


def test_conversation_stays_until_its_replica_is_busier() -> None:
    placer = placer_of(3)
    home = placer.place(asked("first", 20_000, session="talk"))
    placer.took("first", 10)
    placer.ended("first")
    assert placer.place(asked("second", 20_020, session="talk")) == home
    turn, busy = 0, 0
    while placer.place(asked(f"turn {turn}", 20_020, session="talk")) == home:
        placer.ended(f"turn {turn}")
        placer.place(asked(f"other {busy}", max_tokens=8000), among=[str(home)])
        turn, busy = turn + 1, busy + 1
        assert busy < 100, "it stays for ever"
    assert busy > 1


def test_other_tenants_session_has_no_cache() -> None:
    placer = placer_of(2)
    placer.place(asked("mine", 20_000, session="talk", owner="a"))
    placer.took("mine", 1)
    assert placer.place(asked("theirs", 20_000, session="talk", owner="b")) == "r01"


def test_forgotten_caches_keep_no_session() -> None:
    placer = placer_of(2)
    assert placer.place(asked("first", 20_000, session="talk")) == "r00"
    placer.forget()
    assert placer.place(asked("second", 20_000, session="talk")) == "r01"


def test_longer_outputs_count_as_more_load() -> None:
    placer = placer_of(2)
    placer.place(asked("long", max_tokens=10_000), among=["r00"])
    placer.place(asked("short", max_tokens=100), among=["r01"])
    placer.place(asked("longer", max_tokens=20_000))
    assert of(placer) == {"r00": 1, "r01": 2}


def test_full_replica_is_avoided() -> None:
    """The larger one is as busy, but nothing has to wait there."""
    placer = Placer()
    placer.add("large", 64)
    placer.add("small", 4)
    for i in range(64):
        placer.place(asked(i))
    assert of(placer)["small"] < 10


def test_replica_without_free_pages_is_full() -> None:
    placer = placer_of(2, max_running=64)
    for i in range(16):
        placer.place(asked(i))
    gauges = {"running": 6.0, "waiting": 2.0, "pages_free": 1.0, "pages": 100.0}
    placer.stepped("r00", None, gauges)
    placer.check()
    assert placer.loads["r00"].places == 6 and placer.place(asked("next")) == "r01"
    placer.stepped("r00", None, gauges | {"waiting": 0.0})
    assert placer.loads["r00"].places == 64


def test_replicas_are_alike_though_only_one_has_made_steps() -> None:
    placer = placer_of(2)
    slow = Speed(*(3 * seconds for seconds in PRIOR))
    for n in range(1, 100):
        placer.stepped("r00", cycle(slow, n, steps=10), {})
    for i in range(100):
        placer.place(asked(i, max_tokens=4000))
    assert of(placer) == {"r00": 50, "r01": 50}


def test_among_limits_the_choice() -> None:
    placer = placer_of(3)
    assert placer.place(asked(1), among=["r02"]) == "r02"
    assert placer.place(asked(2), among=["gone"]) is None
    assert placer.place(asked(3), among=[]) is None
    assert Placer().place(asked(4)) is None
    assert list(placer.placed) == ["1"]


def test_removed_replica_keeps_no_sequence_counted() -> None:
    placer = placer_of(2)
    for i in range(8):
        placer.place(asked(i))
    placer.remove("r00")
    placer.took("0", 5)
    placer.check()
    for i in range(8):
        placer.place(asked(i), tokens=5)
        placer.check()
    assert of(placer) == {"r01": 8}
    for i in range(8):
        placer.ended(str(i))
    assert placer.loads["r01"].expected == placer.loads["r01"].unread == 0


def test_replica_that_returns_has_an_empty_cache() -> None:
    placer = placer_of(2)
    placer.place(asked("first", 20_000, session="talk"))
    placer.ended("first")
    placer.add("r00", 64)
    placer.place(asked("other"))
    assert placer.place(asked("second", 20_000, session="talk")) == "r01"


# the speed of a replica


FACTORS = st.floats(0.3, 4)


@given(st.tuples(FACTORS, FACTORS, FACTORS, FACTORS), st.integers(2, 5), st.integers(3, 200))
@settings(max_examples=30, deadline=None)
def test_speed_is_learned_from_cycles(
    factors: tuple[float, float, float, float], few: int, many: int
) -> None:
    true, pace = Speed(*(f * prior for f, prior in zip(factors, PRIOR, strict=True))), Pace()
    shapes = ((few, 0, 8000), (few + many, 500, 100), (few + many, 0, 8000), (0, 800, 0))
    learned_s = 0.0
    while learned_s < 60:
        for decoding, rows, context in shapes:
            one = cycle(true, decoding, 4 * rows, 80, context)
            pace.stepped(one)
            learned_s += one.step_s
    for decoding, _, context in shapes[:3]:
        seconds = [cycle(speed, decoding, 0, 1, context).step_s for speed in (pace.speed, true)]
        assert seconds[0] == pytest.approx(seconds[1], rel=0.25)
    assert pace.speed.read == pytest.approx(true.read, rel=0.25)


def test_speed_before_any_cycle_is_the_prior() -> None:
    pace = Pace()
    assert pace.speed == PRIOR
    for seconds in (0.0, -1.0, math.nan, math.inf):
        broken = Cycle(
            context=StepContext(1, 0, 1.0, 0),
            strategy=OFF,
            rows=1,
            emitted=1,
            accepted=(),
            drafted=0,
            step_s=seconds,
        )
        assert not pace.stepped(broken)
    assert pace.speed == PRIOR


# against a slow twin


class SlowTwin:
    """All sequences in one list; every choice computes the seconds at each replica again."""

    def __init__(self) -> None:
        self.replicas: dict[str, int] = {}
        self.open: dict[str, dict[str, Any]] = {}
        self.cached: dict[tuple[str, str], int] = {}  # session, replica

    def seconds(self, name: str, expected: int, tokens: int, session: str) -> float:
        own = [each for each in self.open.values() if each["at"] == name]
        others = sum(min(each["mean"], each["left"]) for each in own)
        places, count = self.replicas[name], len(own)
        context = sum(each["tokens"] for each in own) / max(1, count)
        slowed_s = PRIOR.shared + context * PRIOR.context
        unread = sum(each["unread"] for each in own if not each["started"])
        begin_s = unread * PRIOR.read
        if count and count + 1 > places:
            turns = WAIT + (count + 1 - places) / places
            begin_s += others / count * turns * (PRIOR.each + slowed_s * places)
        together = min(expected * min(count, places - 1), others)
        new = tokens - min(tokens, self.cached.get((session, name), 0))
        alone_s = expected * (PRIOR.each + PRIOR.shared)
        return begin_s + alone_s + together * slowed_s + new * PRIOR.read

    def put(self, id: str, name: str, limit: int, tokens: int, given: int, session: str) -> None:
        new = tokens - min(tokens, self.cached.get((session, name), 0))
        self.open[id] = {
            "at": name,
            "mean": math.ceil(UNKNOWN_SHARE * limit),
            "left": max(0, limit - given),
            "unread": new,
            "started": False,
            "tokens": tokens,
            "session": session,
        }
        self._cache(self.open[id])

    def _cache(self, one: dict[str, Any]) -> None:
        key = one["session"], one["at"]
        self.cached[key] = max(self.cached.get(key, 0), one["tokens"])

    def took(self, id: str, tokens: int) -> None:
        one = self.open[id]
        one["started"] = True
        one["left"] = max(0, one["left"] - tokens)
        one["tokens"] += tokens

    def ended(self, id: str) -> None:
        one = self.open.pop(id)
        if one["started"] and one["at"] in self.replicas:
            self._cache(one)

    def remove(self, name: str) -> None:
        del self.replicas[name]
        for one in self.open.values():
            one["at"] = "" if one["at"] == name else one["at"]  # nowhere, if it comes back, too
        self.cached = {key: size for key, size in self.cached.items() if key[1] != name}


ACTS = st.lists(
    st.tuples(
        st.sampled_from(["place", "place", "place", "place", "took", "ended", "add", "remove"]),
        st.integers(0, 5),
        st.integers(1, 3000),
        st.integers(0, 3),
    ),
    max_size=60,
)


@given(ACTS)
@settings(max_examples=100, deadline=None)
def test_choices_are_those_of_a_slow_twin(acts: list[tuple[str, int, int, int]]) -> None:
    placer, twin, count = Placer(), SlowTwin(), 0
    acts = [("add", number, 1, number) for number in range(3)] + acts
    for act, number, size, session in acts:
        name, ids = f"r{number}", [*twin.open]
        if act == "add" and name not in twin.replicas:
            placer.add(name, session + 1)
            twin.replicas[name] = session + 1
        elif act == "remove" and name in twin.replicas:
            placer.remove(name)
            twin.remove(name)
        elif act == "place":
            count += 1
            request = asked(count, size, 10 * size, session=f"s{session}")
            expected, read = math.ceil(UNKNOWN_SHARE * 10 * size), size + number
            every = {
                each: twin.seconds(each, expected, read, f"s{session}") for each in twin.replicas
            }
            cached = placer._sessions.get((request.tenant, request.group_id), {})
            seconds_L = placer._seconds(expected, read, cached)
            assert dict(zip(placer.loads, seconds_L, strict=True)) == pytest.approx(every)
            chosen = placer.place(request, tokens=number)
            assert (chosen is None) == (not every)
            if chosen is not None:
                assert every[chosen] <= min(every.values()) * (1 + 1e-9)
                twin.put(str(count), chosen, 10 * size, size + number, number, f"s{session}")
        elif act in ("took", "ended") and ids:
            id = ids[size % len(ids)]
            for each in (placer, twin):
                each.took(id, size) if act == "took" else each.ended(id)
        placer.check()


def test_thousands_are_placed_evenly_in_little_time() -> None:
    """The bound on CPU time is generous, since other work slows that down, too."""
    placer = placer_of(64)
    requests = [asked(i, 200 + i // 16, 32_000, session=i // 16) for i in range(4096)]
    began_s = time.process_time()
    for request in requests:
        placer.place(request)
    assert time.process_time() - began_s < 2.0
    assert set(of(placer).values()) == {64}
    placer.check()


def test_order_of_joining_changes_no_choice() -> None:
    forwards, backwards = Placer(), Placer()
    for number in range(8):
        forwards.add(f"r{number}", 8)
        backwards.add(f"r{7 - number}", 8)
    requests = [asked(i, 100 + 7 * i % 50, 500 + i % 3, session=i // 4) for i in range(200)]
    assert [forwards.place(each) for each in requests] == [
        backwards.place(each) for each in requests
    ]


def test_sessions_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placing, "SESSIONS", 10)
    placer = placer_of(20)
    for i in range(50):
        for j in range(20):
            placer.place(asked(f"{i} {j}", session=i))
        placer.check()
    assert len(placer._sessions) == 10
