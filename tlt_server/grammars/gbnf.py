"""Converts grammars in GBNF or in Lark's form to Lark's form.

llguidance parses GBNF. Here names, escapes and repetitions get a form with the same meaning in
Lark.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container
from typing import Any

from tlt_server.errors import InvalidRequest

_GBNF = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
_CODE = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8})")
_CHARACTER = re.compile(r"\\x(?P<code>..)|\\(?P<escaped>.)", re.DOTALL)
_OPERATOR = re.compile(r"\\.|[&~]", re.DOTALL)  # doubled, these are operators of a regex's class
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t"}


def as_lark(text: str) -> str:
    """Return a grammar in Lark's form."""
    return _of_gbnf(text) if _GBNF.search(text) else text


def _of_gbnf(text: str) -> str:
    from llguidance.gbnf_to_lark import GbnfToLarkError, GrammarParser, resolve

    parser: Any = GrammarParser()
    names = {"root": "root", "": "start"}  # own -> in Lark; the library makes root the start
    read_char, read_name = parser._parse_char, parser._parse_name

    def parse_name(at: Any) -> tuple[str, Any]:
        name, after = read_name(at)
        if name not in names:
            names[name] = _lark_name(name, names.values())
        return names[name], after

    parser._parse_char, parser._parse_name = lambda at: _char(read_char, at), parse_name
    try:
        rules = parser.parse(text)
        for name in names:
            if name and names[name] not in rules:
                raise InvalidRequest(f"the grammar has no rule {name!r}; define it")
        resolve(rules)
        for rule in rules.values():
            _mend(rule)
        return "%llguidance {}\n\n" + "".join(f"{rule}\n" for rule in rules.values())
    except GbnfToLarkError as error:
        raise InvalidRequest(f"the grammar is not GBNF: {str(error)[:300]}") from None
    except (RecursionError, IndexError, ValueError, KeyError) as error:
        raise InvalidRequest(
            f"the grammar cannot be read as GBNF: {type(error).__name__} {str(error)[:80]}"
        ) from None


def _lark_name(name: str, taken: Container[str]) -> str:
    """Return an unused name in Lark, which forbids dashes and uses case for terminals."""
    own = re.sub(r"[^a-z0-9]", "_", name.lower())
    own = own if own[0].isalpha() else f"r{own}"
    while own in taken:
        own += "_"
    return own


def _char(read: Callable[[Any], tuple[str, Any]], at: Any) -> tuple[str, Any]:
    """Read a character. A numeric escape becomes the character itself, or an escape of two digits,
    which is also valid in a regex.
    """
    code = _CODE.match(at.text, at.pos)
    if code is None:
        return read(at)
    number = int(code[0][2:], 16)
    if number > 0x10FFFF or 0xD800 <= number < 0xE000:
        raise InvalidRequest(f"the grammar has {code[0]}, which is not a character")
    return f"\\x{number:02x}" if number < 128 else chr(number), at.advance(len(code[0]))


def _mend(node: Any) -> None:
    """Rewrite the texts of a node and its descendants so that they have the same meaning in
    Lark.
    """
    from llguidance import gbnf_to_lark as library

    for child in node.children():
        _mend(child)
    if isinstance(node, library.LiteralNode):
        node.value = json.dumps(_CHARACTER.sub(_character, node.value), ensure_ascii=False)[1:-1]
    elif isinstance(node, library.RegexNode):
        node.rx = "(?s:.)" if node.rx == "." else _OPERATOR.sub(_escaped, node.rx)
    elif isinstance(node, library.RepetitionNode):
        if isinstance(node.node, library.RepetitionNode):
            node.node = library.AlternativeNode([node.node])  # in brackets


def _character(found: re.Match[str]) -> str:
    if found["code"]:
        return chr(int(found["code"], 16))
    return _CONTROLS.get(found["escaped"], found["escaped"])


def _escaped(found: re.Match[str]) -> str:
    return found[0] if len(found[0]) > 1 else f"\\{found[0]}"
