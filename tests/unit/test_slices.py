"""JSON in slices: the same bytes as in one piece, and no slice is large."""

from __future__ import annotations

from itertools import repeat
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET, Struct, UnsetType

from tlt_server.frontend.dialects.replies.logprobs import (
    Alternative,
    ChatLogprobs,
    ChatToken,
    Logprobs,
)
from tlt_server.frontend.http.slices import SLICE_BYTES, json_slices, values
from tlt_server.wire.packed import PackedIds, PackedText
from tlt_server.wire.records import TokenLogprobs


class Node(Struct, kw_only=True, rename="camel"):
    long_name: Any
    absent: int | UnsetType = UNSET


scalars = st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats(allow_nan=False)
texts = st.text(max_size=20)
long_texts = st.builds(lambda text, times: text * times, texts, st.integers(0, 3000))
leaves = scalars | texts | long_texts | st.builds(TokenLogprobs, st.just((1,)), st.just((-0.5,)))
contents = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(st.text(max_size=5), inner, max_size=5)
        | st.builds(lambda value: Node(long_name=value), inner)
    ),
    max_leaves=12,
)
long = st.builds(lambda value, times: [value] * times, contents, st.integers(0, 1000))


@pytest.mark.slow
@given(contents | long | st.lists(long, max_size=3))
def test_json_slices_join_to_the_whole_encoding(content: Any) -> None:
    slices = [*json_slices(content, head=b"data: ", tail=b"\n\n")]
    assert b"".join(slices) == b"data: " + msgspec.json.encode(content) + b"\n\n"
    assert all(len(each) >= SLICE_BYTES for each in slices[:-1])


@pytest.mark.parametrize(
    "content",
    [
        {"ids": [*range(200_000)]},
        [TokenLogprobs((*range(20),), (-1 / 3,) * 20)] * 5000,
        {"choices": [Node(long_name=[[-1 / 3] * 20] * 3000)] * 3},
        [{str(i): -1 / 3 for i in range(20)}] * 5000,
        {"results": [{"a": 1}, {"a": [[-1 / 3] * 20] * 5000}, {"a": 1}]},
        [Node(long_name=1), Node(long_name=[{"a": -1 / 3}] * 50_000), Node(long_name=1)],
        [None, *[TokenLogprobs((*range(20),), (-1 / 3,) * 20)] * 5000],
        {"choices": [Node(long_name="a text " * 200_000)] * 2},
    ],
)
def test_slices_of_a_large_content_have_a_bounded_size(content: Any) -> None:
    assert max(map(len, json_slices(content))) < 4 * SLICE_BYTES


SCORED = {
    "plain": {"token_ids": [*range(256)], "logprobs": [-1 / 3] * 256, "text": "a text " * 256},
    "completion": Logprobs(["a"] * 256, [-1 / 3] * 256, [{"a": -1 / 3}] * 256, [*range(256)]),
    "chat": ChatLogprobs([ChatToken("a", -1 / 3, [97], [Alternative("a", -1 / 3, [97])])] * 256),
}


@pytest.mark.parametrize("name", SCORED)
def test_reply_of_256_tokens_is_encoded_in_one_call(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = {"choices": [Node(long_name=SCORED[name])]}
    whole, calls, encode = msgspec.json.encode(content), 0, msgspec.json.encode

    def counted(part: Any) -> bytes:
        nonlocal calls
        calls += 1
        return encode(part)

    monkeypatch.setattr(msgspec.json, "encode", counted)
    assert [*json_slices(content)] == [whole]
    assert calls == 1


@pytest.mark.parametrize(
    "content",
    [
        [0.5, [[0.5] * 1000] * 1000],
        ["a", [[0.5] * 1000] * 1000],
        {"a": 0.5, "b": [[0.5] * 1000] * 1000},
        [{"a": 0.5}, {"a": [[0.5] * 1000] * 1000}],
        (0.5, (iter(()),)),
    ],
)
def test_large_member_after_small_ones_is_counted(content: Any) -> None:
    assert values(content) > 1024


@pytest.mark.parametrize("content", ["é\n" * 50_000, {"text": "a" * 20_000}, ["b" * 20_000, 1]])
def test_long_text_survives_slicing(content: Any) -> None:
    assert msgspec.json.decode(b"".join(json_slices(content))) == content


@pytest.mark.parametrize("count", [0, 1, 100_000])
def test_packed_ids_and_texts_encode_as_lists_and_strings(count: int) -> None:
    ids, text = [*range(count)], "é\n" * count
    content = {"ids": PackedIds.of(ids), "n": count, "texts": [PackedText.of(text), None]}
    slices = [*json_slices(content)]
    whole = {"ids": ids, "n": count, "texts": [text, None]}
    assert b"".join(slices) == msgspec.json.encode(whole)
    assert max(map(len, slices)) < 4 * SLICE_BYTES


def test_iterators_encode_as_lists_and_are_read_lazily() -> None:
    made = 0

    def parts() -> Any:
        nonlocal made
        for i in range(10_000):
            made += 1
            yield (-i / 3, i, None)

    slices = json_slices({"a": [], "scored": parts(), "none": iter(())})
    first = next(slices)
    assert made < 5000
    found = msgspec.json.decode(first + b"".join(slices))
    assert found == {"a": [], "scored": [[-i / 3, i, None] for i in range(10_000)], "none": []}


def test_endless_content_is_encoded_lazily() -> None:
    slices = json_slices(repeat(0.5))
    assert sum(len(next(slices)) for _ in range(10)) < 10 * 4 * SLICE_BYTES
