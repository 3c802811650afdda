"""Places of requests in progress: all for one key alone, a share of them for each of several."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from tlt_server.frontend.http.places import OVER, Places

LIMIT = 6


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.booleans()), max_size=60))
def test_a_key_within_its_share_gets_a_place_until_all_have_twice_the_limit(
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


def test_the_refusal_tells_a_key_what_it_holds_of_all() -> None:
    places = Places(2)
    places.take("greedy")
    places.take("greedy")
    assert places.full("greedy").message.startswith("3 requests are in progress; the limit is 2 ")
    places.take("small")
    assert "4 requests are in progress, 3 of them this key's; " in places.full("greedy").message
