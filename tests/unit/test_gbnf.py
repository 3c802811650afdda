"""Grammars in GBNF mean in Lark's form what they do in llama.cpp, and errors name their rules."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tokenizers import FAMILIES
from tlt_server.errors import InvalidRequest
from tlt_server.grammars.compiler import Compiler
from tlt_server.grammars.forms import grammar_of

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
def test_gbnf_allows_the_texts_that_it_names(name: str, tmp_path: Path) -> None:
    text, right, wrong = CASES[name]
    compiler = Compiler(FAMILIES["no marks"].write(tmp_path), 300, [256])
    start = compiler.compile(grammar_of("grammar", text))
    for output in (*right, *wrong):
        tokens, state = [*output.encode()], start.deep_copy()
        taken = state.try_consume_tokens(tokens) == len(tokens) and state.is_accepting()
        assert taken == (output in right), output


@pytest.mark.parametrize("text", WRONG)
def test_gbnf_that_cannot_be_read_is_named(text: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        grammar_of("grammar", text)
    assert WRONG[text] in str(refused.value)
