"""Places of requests in progress: all for one key alone, a share of them for each of several."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlt_server.errors import TltError
from tlt_server.frontend.http import limits as limits_module
from tlt_server.frontend.http.auth import ADMITTED, Admitted
from tlt_server.frontend.http.connections import PlaceLimit, Places
from tlt_server.frontend.http.keys import Caller
from tlt_server.frontend.http.limits import BodyBudget
from tlt_server.process.turns import OVER

LIMIT = 6


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.booleans()), max_size=60))
def test_key_within_its_share_gets_slots_up_to_twice_the_limit(
    calls: list[tuple[str, bool]],
) -> None:
    places, held = Places(LIMIT), Counter[str]()
    for owner, comes in calls:
        taken, owners = held.total(), len(+held | Counter([owner]))
        if not comes:
            if held[owner]:
                places.leave(owner)
                held[owner] -= 1
        elif places.fits(owner):
            places.take(owner)
            held[owner] += 1
            assert taken < LIMIT or held[owner] <= LIMIT / owners
        else:
            assert taken >= LIMIT and (taken >= OVER * LIMIT or held[owner] + 1 > LIMIT // owners)
        places.check()


def test_refusal_tells_a_key_its_share_of_all_slots() -> None:
    places = Places(2)
    places.take("greedy")
    places.take("greedy")
    assert places.full("greedy").message.startswith("3 requests are in progress; the limit is 2 ")
    places.take("small")
    assert "4 requests are in progress, 3 of them this key's; " in places.full("greedy").message


class Body:
    was_cut = False

    def cut(self, error: TltError) -> None:
        self.was_cut = True


@pytest.mark.parametrize(("owner", "served"), [("slow", True), ("new", True), ("greedy", False)])
def test_stalled_body_frees_a_slot_according_to_shares(
    monkeypatch: pytest.MonkeyPatch, owner: str, served: bool
) -> None:
    """A key beyond its share has only its own."""
    monkeypatch.setattr(limits_module, "STALLED_S", 0.0)
    answered: list[str] = []

    def app(what: str) -> Any:
        async def answer(*_: object) -> None:
            answered.append(what)

        return answer

    budget, body = BodyBudget(100), Body()
    limit = PlaceLimit(
        app("served"), max_connections=LIMIT, budget=budget, refuse=lambda *_: app("refused")
    )
    for holder in ["greedy", "slow"] * LIMIT:
        limit.http.take(holder)
    budget.take("slow", body, 10)
    scope: dict[str, Any] = {
        "type": "http",
        "path": "/generate",
        "state": {ADMITTED: Admitted(Caller(owner, frozenset()), None)},
    }
    asyncio.run(limit(scope, None, None))  # type: ignore[arg-type]
    assert (answered, body.was_cut) == ((["served"], True) if served else (["refused"], False))
