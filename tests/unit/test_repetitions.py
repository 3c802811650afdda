"""Counted repetitions inside each other are refused before they run, in every form."""

from __future__ import annotations

import json

import pytest

from tlt_server.errors import InvalidRequest
from tlt_server.grammars.forms import check_grammar, grammar_of
from tlt_server.records import Grammar

REFUSED = [
    "((a{1,200}){1,200}){1,200}b",
    "(?:x|(?P<n>[ab]{150}y?){2,150})+",
    r"(\p{Greek}{101}\){){100}",
    "([]a{9}]{1,2000}){6}",
    "(a{500,}){500,}",
    "(b(c(d{30})*){30}){30}",
]
KEPT = [
    "a{1,50000}b{50000}",
    "([0-9]{1,3}\\.){3}[0-9]{1,3}",
    "(a{100}){100}",
    r"(\{200}\x{200}a{9}){200}",
    "([{200}a]{9}){900}",
    "(a{1,200}|){1}" * 3,
    "(((",
]


@pytest.mark.parametrize("regex", REFUSED)
def test_repetitions_that_multiply_are_refused_in_every_form(regex: str) -> None:
    for form, text in (
        ("regex", regex),
        ("grammar", f"start: A\nA: /{regex}/"),
        ("json_schema", json.dumps({"items": {"type": "string", "pattern": regex}})),
        ("json_schema", json.dumps({"patternProperties": {regex: {"type": "null"}}})),
    ):
        with pytest.raises(InvalidRequest, match="multiply to .*the limit is 10000: lower"):
            grammar_of(form, text)
    with pytest.raises(InvalidRequest, match="multiply"):
        check_grammar(Grammar(kind="regex", text=regex))


@pytest.mark.parametrize("regex", KEPT)
def test_other_repetitions_are_let_in(regex: str) -> None:
    assert grammar_of("regex", regex).text == regex
    grammar_of("grammar", f"start: A\nA: /{regex}/")
    grammar_of("json_schema", json.dumps({"type": "string", "pattern": regex}))
