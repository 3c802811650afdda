"""Names in SGLang's form: what is wrong with `rid` is said of `rid`, in our words."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest

from tlt_server.errors import InvalidRequest
from tlt_server.frontend.dialects.sglang.requests import GenerateFields
from tlt_server.frontend.http.counting import Bounds
from tlt_server.frontend.http.parsing import parse


def read(fields: dict[str, Any]) -> GenerateFields:
    return parse(GenerateFields, msgspec.json.encode(fields), Bounds(8, 100, 101, 4, 4, 8))


@pytest.mark.parametrize(
    ("rid", "message"),
    [
        (5, "rid is 5; it must be a string or a list"),
        ("", "rid is ''; it must have at least 1 character"),
        ({"a": 1}, "rid is {'a': 1}; it must be a string or a list"),
        (["a", 5], "rid[1] is 5; it must be a string"),
        (["a", ""], "rid[1] is ''; it must have at least 1 character"),
        ([], "rid is []; it must have at least 1 item"),
        (["a"], "rid has 1 names and there are 2 prompts; give each prompt one, or leave rid out"),
        (["a", "a"], "rid has 'a' twice; give each prompt its own name"),
        (
            "x" * 255,
            "rid has 255 characters, and 2 prompts are named by it with _0 to _1 at its end; a "
            "name has at most 256: give a shorter one",
        ),
    ],
    ids=str,
)
def test_invalid_rid_is_refused_by_field_name(rid: Any, message: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read({"text": ["q", "r"], "rid": rid}).native()
    assert refused.value.message == message


def test_prompts_get_the_given_request_ids() -> None:
    for rid, names in (("a", ["a_0", "a_1"]), (["a", "b"], ["a", "b"]), (None, [None, None])):
        asked = read({"text": ["q", "r"], "rid": rid})
        assert asked.names(2) == names
    assert read({"text": "q", "rid": "x" * 256}).names(1) == ["x" * 256]


def test_listed_prompt_is_named_by_its_index() -> None:
    with pytest.raises(InvalidRequest, match=r"^text\[1\] is 4; it must be a string$"):
        read({"text": ["q", 4]})


def test_repeated_rid_is_found_in_one_pass() -> None:
    names = [*map(str, range(2**15)), "0"]
    asked = GenerateFields(text=["q"] * len(names), rid=[*names[1:], names[-2]])
    started_s = time.thread_time()
    with pytest.raises(InvalidRequest, match="rid has '32767' twice"):
        asked.names(len(names))
    assert time.thread_time() - started_s < 1  # to compare each with each takes 4 s
