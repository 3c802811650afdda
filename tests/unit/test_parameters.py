"""Parameters outside the body: read from a request by an argument's annotation, described by it,
and refused by name, value and limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import pytest
from msgspec import Meta
from starlette.requests import Request

from tlt_server.errors import InvalidRequest
from tlt_server.frontend.http.endpoints import HEADER, REQUIRED, Parameter

SAID = "said"
Word = Literal["b", "a"]
COUNT = Annotated[int, SAID, Meta(ge=1, le=20)]
SECONDS = Annotated[float, SAID, Meta(ge=0, le=60)]


def declared(hint: Any, default: Any = None, path: tuple[str, ...] = ()) -> Parameter:
    found = Parameter.of("some_name", hint, default, path)
    assert found is not None
    return found


def request(query: str = "", **about: Any) -> Request:
    scope = {"type": "http", "query_string": query.encode(), "headers": [], "path_params": {}}
    return Request(scope | about)


@pytest.mark.parametrize(
    ("hint", "text", "value"),
    [
        (Annotated[Word, SAID], "a", "a"),
        (Annotated[bool, SAID], "True", True),
        (Annotated[bool, SAID], "0", False),
        (COUNT, "20", 20),
        (SECONDS, "1.5", 1.5),
        (Annotated[str | None, SAID], "%20any", " any"),
        (Annotated[Sequence[Word], SAID], "a,b&some_name=a", ["a", "b", "a"]),
    ],
)
def test_parameter_value_has_the_type_of_its_argument(hint: Any, text: str, value: Any) -> None:
    parameter = declared(hint, "the default")
    assert parameter.read(request(f"some_name={text}&other=1")) == value
    absent = [] if isinstance(value, list) else "the default"
    assert parameter.read(request("other=1")) == absent


@pytest.mark.parametrize(
    ("hint", "text", "limit"),
    [
        (Annotated[Word, SAID], "c", "one of b, a"),
        (Annotated[bool, SAID], "maybe", "one of true, 1, yes, on, false, 0, no, off"),
        *(
            (COUNT, text, "a whole number from 1 to 20")
            for text in ("0", "21", "-1", "1.0", "9" * 99)
        ),
        *((SECONDS, text, "a number of seconds from 0 to 60") for text in ("-1", "61", "nan", "x")),
        (Annotated[Sequence[Word], SAID], "a,", "one of b, a"),
    ],
)
def test_invalid_parameter_is_refused_with_its_limit(hint: Any, text: str, limit: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^some_name (is|has) .*; it must be {limit}"):
        declared(hint).read(request(f"some_name={text}"))


def test_parameters_are_read_from_path_query_and_header() -> None:
    hint, marked = Annotated[str, SAID], Annotated[str, HEADER, SAID]
    places = [declared(hint, REQUIRED, ("some_name",)), declared(hint), declared(marked, "")]
    assert [(each.place, each.name) for each in places] == [
        ("path", "some_name"),
        ("query", "some_name"),
        ("header", "Some-Name"),
    ]
    sent = request("some_name=q", path_params={"some_name": "p"}, headers=[(b"some-name", b"h")])
    assert [each.read(sent) for each in places] == ["p", "q", "h"]
    assert Parameter.of("body", dict, REQUIRED, ()) is None


def test_parameter_schema_has_choices_bounds_and_default() -> None:
    words = {"type": "string", "enum": ["b", "a"]}
    assert declared(Annotated[Word, SAID], "a").schema == words | {"default": "a"}
    assert declared(Annotated[Sequence[Word], SAID], ()).schema == {"type": "array", "items": words}
    bounded = {"type": "integer", "minimum": 1, "maximum": 20}
    assert declared(COUNT, REQUIRED).schema == bounded
    assert declared(COUNT, 2).schema == bounded | {"default": 2}
    assert declared(Annotated[str | None, SAID]).schema == {"type": "string"}
