"""Grammars before they are compiled: GBNF in Lark's form, the properties that schemas leave open,
and repetitions inside each other, which are refused before they run.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.tokenizers import FAMILIES
from tlt_server.errors import InvalidRequest
from tlt_server.grammars.closing import closed
from tlt_server.grammars.compiler import Compiler
from tlt_server.grammars.forms import check_grammar, grammar_of
from tlt_server.grammars.lark_repetitions import _tokens
from tlt_server.wire.records import Grammar

CASES = {
    "optional repetition": ('root ::= ([0-9]+)? "x"', ["x", "12x"], ["1", "xx"]),
    "counts of counts": ('root ::= ("a"{1,2}){2} "b"', ["aab", "aaaab"], ["ab", "aaaaab"]),
    "repeated option": ('root ::= (("a")?)* "b"', ["b", "aab"], ["a"]),
    "codes in texts": (
        r'root ::= "\x41\u0042\U0001F600\u00e9\x22\x5c"',
        ['AB\U0001f600é"\\'],
        ["AB"],
    ),
    "code, then digits": (r'root ::= "\u0041B\x2dC"', ["AB-C"], ["\u041b-C"]),
    "escapes": (r'root ::= "\[\]\\x41\n\"/"', ['[]\\x41\n"/'], ["[]A"]),
    "raw line break": ('root ::= "a\tb"', ["a\tb"], ["ab"]),
    "codes in classes": (r"root ::= [\u0041-\u0043\x2Dz\x5D]+", ["ABC-z]"], ["y", "D"]),
    "classes": (r'root ::= [^"\\/&&[]+ [&&~~]', ["ab&", "x~"], ["/&", "a", "&&"]),
    "any character": ('root ::= . "b"', ["ab", "\nb", "éb"], ["b", "aab"]),
    "names": (
        'root ::= fooBar foo-bar foo_bar FOO start\nfooBar ::= "1"\nfoo-bar ::= "2" | root\n'
        'foo_bar ::= "3"\nFOO ::= "4"\nstart ::= "5"',
        ["12345"],
        ["1235"],
    ),
}
WRONG = {
    'root ::= "a" foo': "the grammar has no rule 'foo'; define it",
    'first ::= "a"': "the grammar has no rule 'root'; define it",
    r'root ::= "\uD800"': r"the grammar has \uD800, which is not a character",
    r"root ::= [a-\UFFFFFFFF]": r"the grammar has \UFFFFFFFF, which is not a character",
    r'root ::= "\x4"': "is not GBNF: Invalid ",
}


@pytest.mark.parametrize("name", CASES)
def test_gbnf_grammar_accepts_its_texts(name: str, tmp_path: Path) -> None:
    text, right, wrong = CASES[name]
    compiler = Compiler(FAMILIES["no marks"].write(tmp_path), 300, [256])
    start = compiler.compile(grammar_of("grammar", text))
    for output in (*right, *wrong):
        tokens, state = [*output.encode()], start.deep_copy()
        taken = state.try_consume_tokens(tokens) == len(tokens) and state.is_accepting()
        assert taken == (output in right), output


@pytest.mark.parametrize("text", WRONG)
def test_unreadable_gbnf_is_named(text: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        grammar_of("grammar", text)
    assert WRONG[text] in str(refused.value)


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
def test_nested_repetitions_are_refused_in_every_form(regex: str) -> None:
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
def test_harmless_repetitions_are_accepted(regex: str) -> None:
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
def test_distinguishable_repetitions_are_accepted(lark: str) -> None:
    grammar_of("grammar", lark)


def test_long_lists_in_a_schema_are_accepted() -> None:
    word = {"type": "string", "pattern": "^[a-z]{1,64}$", "maxLength": 500}
    table = {"type": "array", "maxItems": 1000, "items": {"type": "array", "maxItems": 1000}}
    table["items"] |= {"items": word}
    grammar_of("json_schema", json.dumps({"properties": {f"p{i}": table for i in range(9)}}))


def test_nesting_of_grammars_is_bounded() -> None:
    with pytest.raises(InvalidRequest, match="more than 64 grammars inside each other"):
        grammar_of("grammar", "start: %lark {" * 1000)


@pytest.mark.parametrize("kind", ["regex", "grammar"])
def test_huge_multiplied_repetition_counts_are_refused(kind: str) -> None:
    regex = "a" + "{999999999}" * 500
    with pytest.raises(InvalidRequest, match="multiply to 1000000000000;"):
        grammar_of(kind, regex if kind == "regex" else f"start: /{regex}/")


@pytest.mark.parametrize("opened", ['"' + r"\"" * 60_000, "/" + r"\/" * 60_000])
def test_unclosed_grammar_text_is_read_once(opened: str) -> None:
    assert len([*_tokens(f"start: {opened}")]) == 2  # name and colon


A, B = {"properties": {"a": {"type": "integer"}}}, {"properties": {"b": {"type": "integer"}}}
SELF = {"properties": {"a": {"type": "integer"}, "next": {"$ref": "#"}}}
BASE = {"$defs": {"A": A, "B": {"type": "object", **B}}}
REF_A, REF_B = {"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}
# Each schema, values that it takes, and values that it does not.
OBJECTS: list[tuple[dict[str, Any], list[Any], list[Any]]] = [
    (A, [{}, {"a": 1}], [{"b": 1}, {"a": 1, "b": 1}]),
    ({"type": "object"}, [{}, {"b": 1}], []),
    ({"type": "object", "properties": {}}, [{}], [{"b": 1}]),
    (A | {"additionalProperties": True}, [{"a": 1, "b": 1}], []),
    (A | {"additionalProperties": {"type": "null"}}, [{"b": None}], [{"b": 1}]),
    (A | {"patternProperties": {"^x": {}}}, [{"x1": 1}], []),
    (A | {"required": ["b"]}, [{"b": 1}, {"a": 1, "b": 1}], [{}, {"b": 1, "c": 1}]),
    (A | {"required": ["a"], "minProperties": 2}, [{"a": 1, "b": 1}], [{"a": 1}]),
    ({"properties": {"x": {"items": A}}}, [{"x": [{"a": 1}]}], [{"x": [{"b": 1}]}]),
    ({"allOf": [A, B]}, [{"a": 1, "b": 1}], [{"c": 1}, {"a": "x"}, {"b": "x"}]),
    ({"allOf": [A], **B}, [{"a": 1, "b": 1}], [{"c": 1}]),
    ({"allOf": [A, B | {"additionalProperties": True}]}, [{"c": 1}], []),
    ({"anyOf": [A, B]}, [{"a": 1}, {"b": 1}], [{"a": 1, "b": 1}, {"c": 1}]),
    (A | {"anyOf": [B, {"required": ["a"]}]}, [{"a": 1, "b": 1}, {"a": 1}], [{"c": 1}]),
    (SELF, [{"a": 1, "next": {"a": 1, "next": {}}}], [{"next": {"b": 1}}]),
    (BASE | REF_A, [{"a": 1}], [{"b": 1}]),
    (BASE | {"allOf": [REF_A], "description": "x"}, [{"a": 1}], [{"b": 1}]),
    (BASE | {"allOf": [REF_A, REF_B]}, [{"a": 1, "b": 1}], [{"c": 1}]),
    (BASE | REF_A | B, [{"a": 1, "b": 1}], [{"c": 1}, {"a": "x"}]),
    (BASE | {"properties": {"x": {"anyOf": [REF_A, {"type": "null"}]}}}, [{"x": None}], [{"b": 1}]),
    (BASE | {"items": {"allOf": [REF_A, {"required": ["a"]}]}}, [[{"a": 1}]], [[{"b": 1, "a": 1}]]),
]


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Compiler:
    model = FAMILIES["no marks"].write(tmp_path_factory.mktemp("model"))
    return Compiler(model, 300, [256])


@pytest.mark.parametrize(("schema", "right", "wrong"), OBJECTS, ids=lambda case: str(case)[:60])
def test_objects_with_listed_properties_are_closed(
    compiler: Compiler, schema: dict[str, Any], right: list[Any], wrong: list[Any]
) -> None:
    tag = json.dumps({"format": {"type": "json_schema", "json_schema": schema}})
    for form, text in (("json_schema", json.dumps(schema)), ("structural_tag", tag)):
        start = compiler.compile(grammar_of(form, text))
        for value in (*right, *wrong):
            state = start.deep_copy()
            taken = state.consume_tokens([*json.dumps(value).encode()]) and state.is_accepting()
            assert taken == (value in right), (form, value)
    assert closed(closed(schema)) == closed(schema)


@pytest.mark.parametrize("width", [1, 2])
def test_joined_schema_references_are_bounded(width: int) -> None:
    parts = {f"p{i}": {"allOf": [{"$ref": f"#/$defs/p{i + 1}"}] * width, **A} for i in range(200)}
    schema = {"$defs": parts | {"p200": B}, "allOf": [{"$ref": "#/$defs/p0"}, B]}
    with pytest.raises(InvalidRequest, match="where the references of its allOf are followed"):
        closed(schema)


def test_recursive_reference_leaves_its_object_open() -> None:
    schema = {"$defs": {"A": {"allOf": [{"$ref": "#/$defs/A"}, B]}}, **REF_A}
    assert "additionalProperties" not in json.dumps(closed(schema))
