"""Bodies decoded in pieces: the same values and refusals as at once, and turns for others in
between.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic_core import from_json

from tlt_server.errors import InvalidRequest
from tlt_server.frontend.http import bodies
from tlt_server.frontend.http.bodies import PIECE_BYTES, decoded

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=30,
)


def at_once(body: bytes) -> Any:
    try:
        return from_json(body, allow_inf_nan=False)
    except ValueError:
        return ValueError


def in_pieces(body: bytes) -> Any:
    """Read a body as if everything in it were large."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(bodies, "PIECE_BYTES", 2)
        try:
            return asyncio.run(decoded(body))
        except ValueError:
            return ValueError


@given(JSON, st.sampled_from([None, 0, 1]))
@settings(deadline=None, max_examples=150)
def test_pieces_are_what_the_whole_is(content: Any, indent: int | None) -> None:
    body = json.dumps(content, indent=indent).encode()
    assert in_pieces(body) == at_once(body) == content


@given(JSON, st.data())
@settings(deadline=None, max_examples=300)
def test_what_is_no_json_is_none_in_pieces_either(content: Any, data: st.DataObject) -> None:
    body = bytearray(
        json.dumps({"requests": [{"token_ids": [1, 2], "of": content}], "x": content}).encode()
    )
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(body) - 1))
        body[at : at + data.draw(st.integers(0, 2))] = data.draw(
            st.sampled_from(
                [
                    b"",
                    b",",
                    b'"',
                    b"]",
                    b"}",
                    b"{",
                    b"[",
                    b"\\",
                    b"\xff",
                    b"\x00",
                    b"NaN",
                    b"Infinity",
                    b"-",
                    b" ",
                ]
            )
        )
    assert in_pieces(bytes(body)) == at_once(bytes(body))


def test_a_body_as_deep_as_it_is_long_is_refused() -> None:
    for opening in (b"[", b'{"a":', b'[{"a":'):
        assert in_pieces(opening * 10**5) is ValueError


def test_others_have_their_turn_between_pieces() -> None:
    body = json.dumps({"requests": [{"token_ids": list(range(3000))} for _ in range(200)]}).encode()
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def run() -> Any:
        beside = asyncio.create_task(other())
        content = await decoded(body)
        beside.cancel()
        return content

    assert asyncio.run(run()) == json.loads(body)
    assert turns >= len(body) / PIECE_BYTES


def test_an_object_of_too_many_fields_is_refused_before_it_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bodies, "MAX_MEMBERS", 1000)
    body = json.dumps({"sampling": {f"field {i} with a name": i for i in range(20000)}}).encode()
    with pytest.raises(InvalidRequest, match="has 20000 fields; the limit is 1000"):
        asyncio.run(decoded(body))


def test_a_list_of_too_many_members_is_refused_before_they_are_made_but_not_one_of_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bodies, "MAX_MEMBERS", 1000)
    for member in ("[]", '{"token_ids":[1]}', '"x"'):
        body = b'{"requests":[' + b",".join([member.encode()] * 150_000) + b"]}"
        with pytest.raises(
            InvalidRequest, match="a list in the body has 150000 members; the limit is 1000"
        ):
            asyncio.run(decoded(body))
    ids = list(range(100_000))
    assert asyncio.run(decoded(json.dumps({"token_ids": ids}).encode())) == {"token_ids": ids}
