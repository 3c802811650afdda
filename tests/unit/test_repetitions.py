"""Counted repetitions inside each other are refused before they run, in every form, through names
and signs; those that a text tells apart are let in.
"""

from __future__ import annotations

import json
import re

import pytest

from tlt_server.errors import InvalidRequest
from tlt_server.grammars.forms import check_grammar, grammar_of
from tlt_server.grammars.lark_repetitions import _tokens
from tlt_server.wire.records import Grammar

REFUSED = [
    "((a{1,200}){1,200}){1,200}b",
    "(?:x|(?P<n>[ab]{150}y?){2,150})+",
    r"(\p{Greek}{101}\){){100}",
    "([]a{9}]{1,2000}){6}",
    "(a{500,}){500,}",
    "(b(c(d{30})*){30}){30}",
    "a{50000}|((b{200}){100})",
    "(a{200}){2}{200}",
    "((a?){1, 200}){ 1 ,200}",
    "(a{0000000000200}){0200}",
    "(a{99999999999999}){2}",
    "(?i:(?i:a{1,200}){1,200}){1,200}b",
    "(?x)((a {1,200}) {1,200}) {1,200} b",
    "b(?x:(a{1,200}) {1,200})",
    "((?-i)(?x) a\\ {200} ){200}",
    "([^](]{200}){200}",
]
# Whole grammars, each with the rule that has the product.
THROUGH_NAMES = {
    'start: X\nX: Y{1,200}\nY: Z{1,200}\nZ: "a"': "X",
    'start: e "b"\ne: X~200\nX: "a"{1,200}': "e",
    'start: "b" e~1..200\ne: x ~ 1 .. 200\nx: "a"': "start",
    'start: ((("a"){1,200}) | "c"){,200} "b"': "start",
    'start: [ [ "a"{200} ]{200} ]': "start",
    'root ::= ((("a"){1,200} | "c"){1,200}){1,200} "b"': "start",
    "root ::= x{1,200}\nx ::= y{1,200}\ny ::= [a-z]{1,200}": "X",
    'start: a\na: b{200}\nb: c\nc: a | X{200}\nX: "x"': "a",
    'start: b\na: b{200}\nb: c\nc: a | X{200}\nX: "x"': "a",
    'start[lazy]: x{200}\n!x.3: y\ny: "a" -> one\n  | "b"{200} // {1}\n': "start",
    'start: %lark {\nstart: e{200}\ne: "a"{,200}\n}': "start",
    'start: e{150}\ne: %lark {\nstart: "a"{150}\n}': "start",
    'start: ("a" X){1,200}\nX: /a{1,200}/': "start",
    'start: (X ","?){1,200}\nX: "a".."z"\nX: "ab"{200}': "start",
}
MARKED = ["/(a {1,200} ) {1,200}/x", "/((a{1,200}\n){1,200}){1,200}/", "/(a{150}){150}/i"]
# Each character tells whether a repetition goes on or its part begins again.
TOLD_APART = [
    'start: NAME ("," NAME){0,999}\nNAME: /[a-z]{1,30}/',
    'start: item{1,1000}\nitem: "(" FIELD{1,20} ")"\nFIELD: /[a-z]{1,30}=[0-9]{1,10};/',
    'start: ROW{1,1000}\nROW: (CELL ","){1,50} "\\n"\nCELL: /[^,\\n]{1,100}/',
    'start: (W " "){1,500}\nW: ("a".."z"){1,30}',
    "start: line{1,500}\nline: /[^\\n]{1,200}\\n/",
    'start: line{1,500}\nline: WORD (" " WORD){0,20} "."\nWORD: /\\w{1,40}/',
    'root ::= item (", " item){0,300}\nitem ::= [a-zA-Z0-9]{1,60}',
    "start: value\nvalue: obj | arr | STR | NUM\n"
    'obj: "{" (pair ("," pair){0,200})? "}"\npair: STR ":" value\n'
    'arr: "[" (value ("," value){0,200})? "]"\nSTR: /"[^"]{0,200}"/\nNUM: /-?[0-9]{1,20}/',
    'start: "((a{200}){200})" /a{200}/ // {200}\n',
    'start: %json {"type": "array", "maxItems": 999, "items": {"type": "string", "maxLength": 99}}',
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


@pytest.mark.parametrize("lark", THROUGH_NAMES)
def test_repetitions_multiply_through_names_and_groups(lark: str) -> None:
    rule = re.escape(f"the rule {THROUGH_NAMES[lark]!r} of the grammar")
    with pytest.raises(InvalidRequest, match=f"^{rule} .* multiply to .*the limit is 10000: lower"):
        grammar_of("grammar", lark)
    tag = {"type": "tag", "begin": "<", "content": {"type": "grammar", "grammar": lark}, "end": ">"}
    with pytest.raises(InvalidRequest, match="multiply"):
        grammar_of("structural_tag", json.dumps({"format": tag}))


@pytest.mark.parametrize("literal", MARKED)
def test_repetitions_multiply_in_regexes_of_grammars(literal: str) -> None:
    with pytest.raises(InvalidRequest, match="the regex at character 8 .* multiply"):
        grammar_of("grammar", f"start: {literal}")


@pytest.mark.parametrize("lark", TOLD_APART)
def test_repetitions_that_a_text_tells_apart_are_let_in(lark: str) -> None:
    grammar_of("grammar", lark)


def test_long_lists_in_a_schema_are_let_in_next_to_and_inside_each_other() -> None:
    word = {"type": "string", "pattern": "^[a-z]{1,64}$", "maxLength": 500}
    table = {"type": "array", "maxItems": 1000, "items": {"type": "array", "maxItems": 1000}}
    table["items"] |= {"items": word}
    grammar_of("json_schema", json.dumps({"properties": {f"p{i}": table for i in range(9)}}))


def test_grammars_inside_each_other_have_a_limit() -> None:
    with pytest.raises(InvalidRequest, match="more than 64 grammars inside each other"):
        grammar_of("grammar", "start: %lark {" * 1000)


@pytest.mark.parametrize("kind", ["regex", "grammar"])
def test_counts_multiply_to_numbers_of_any_length(kind: str) -> None:
    regex = "a" + "{999999999}" * 500
    with pytest.raises(InvalidRequest, match="multiply to 1000000000000;"):
        grammar_of(kind, regex if kind == "regex" else f"start: /{regex}/")


@pytest.mark.parametrize("opened", ['"' + r"\"" * 60_000, "/" + r"\/" * 60_000])
def test_a_text_that_never_closes_is_read_once(opened: str) -> None:
    assert len([*_tokens(f"start: {opened}")]) == 2  # name and colon
