"""Replays of the calls of each family of trainers, written by hand after the wire's tables; every
field of every reply is compared.

`calls/*.json`: `reply` is the whole reply, `has` a part of it; "<int>" and the like stand for any
value of that type.
"""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.frontend.live_server import LiveServer, serving

CALLS = Path(__file__).parent / "calls"
FAMILIES = {"trl", "prime_rl", "art", "skyrl", "slime", "miles", "areal"}
TYPES = {f"<{kind.__name__}>": kind for kind in (int, float, str, list, dict)}


server = serving(scope="function")


def test_every_trainer_family_has_a_file_of_calls() -> None:
    assert {file.stem for file in CALLS.glob("*.json")} == FAMILIES


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_calls_are_answered_as_their_clients_expect(family: str, server: LiveServer) -> None:
    for place, call in enumerate(json.loads((CALLS / f"{family}.json").read_text())):
        method, _, path = call["call"].partition(" ")
        content = json.dumps(call["body"]).encode() if "body" in call else b""
        response = httpx.request(method, server.url + path, content=content, timeout=10)
        where = f"{family}[{place}] {call['call']}"
        assert response.status_code == call["status"], (where, response.text)
        assert ("reply" in call) != ("has" in call), where
        found = response.json() if response.content else None
        compare(where, found, call.get("reply", call.get("has")), whole="reply" in call)


def compare(where: str, found: Any, expected: Any, *, whole: bool) -> None:
    if isinstance(expected, str) and expected in TYPES:
        assert isinstance(found, TYPES[expected]) and not isinstance(found, bool), (where, found)
    elif isinstance(expected, dict):
        assert isinstance(found, dict), (where, found)
        assert found.keys() >= expected.keys() and (not whole or found.keys() == expected.keys()), (
            where,
            found.keys() ^ expected.keys(),
        )
        for name, value in expected.items():
            compare(f"{where}.{name}", found[name], value, whole=True)
    elif isinstance(expected, list):
        assert isinstance(found, list) and len(found) == len(expected), (where, found)
        for i, (one, value) in enumerate(zip(found, expected, strict=True)):
            compare(f"{where}[{i}]", one, value, whole=True)
    else:
        assert found == expected and isinstance(found, bool) == isinstance(expected, bool), (
            where,
            found,
            expected,
        )


@pytest.mark.parametrize(
    ("found", "expected", "whole"),
    [
        ({"a": 1, "b": 2}, {"a": 1}, True),
        ({"a": 2}, {"a": 1}, False),
        ([1], [1, 2], True),
        ({"a": True}, {"a": "<int>"}, True),
        ({"a": {"b": 1, "c": 2}}, {"a": {"b": 1}}, False),
        ({"a": 1}, {"a": True}, True),
    ],
)
def test_comparison_of_calls_detects_a_difference(found: Any, expected: Any, whole: bool) -> None:
    with pytest.raises(AssertionError):
        compare("", found, expected, whole=whole)
