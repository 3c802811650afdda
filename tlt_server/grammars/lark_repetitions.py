"""The counted repetitions of a grammar in Lark's form, across the names of its rules and terminals.
`repetitions` describes which of them multiply.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from tlt_server.errors import InvalidRequest
from tlt_server.grammars.repetitions import (
    ALL,
    TOKEN,
    CountedPart,
    Stack,
    chars,
    check,
    check_repetitions,
    number,
    span,
)

MAX_LEVELS = 64  # grammars inside each other
ROUNDS = 2  # in the second one, what recursive rules refer to is known
ANYTHING = CountedPart(first=ALL, tail=ALL)
_TOKEN = re.compile(
    r"""(?P<skip>(?:\#|//)[^\n]*|[ \t\r]+)
    |(?P<text>"(?:\\.|[^"\\\n])*"i?)
    |(?P<regex>/(?:\\.|[^/\\])+/[imslux]*)
    |(?P<open>"(?:\\.|[^"\\\n])*|/(?:\\.|[^/\\])*)
    |(?P<special><[^<>\s]+>)
    |(?P<name>[!?]*[A-Za-z_][\w-]*)
    |(?P<number>[0-9]+)
    |(?P<word>%\w+|@[\w-]+|->|::|\.\.)
    |(?P<line>\n\s*)
    |(?P<sign>.)""",
    re.VERBOSE | re.DOTALL,
)
_SPACE = re.compile(r"\s*")


class _Token(NamedTuple):
    kind: str
    text: str
    part: CountedPart | None = None  # None: a sign or a name


def check_lark(lark: str) -> None:
    """Refuse a grammar whose nested counted repetitions multiply to too much, naming the regex or
    rule.
    """
    _whole([*_tokens(lark)], 0)


def _tokens(lark: str) -> Iterator[_Token]:
    at = 0
    while (found := _TOKEN.match(lark, at)) is not None:
        kind, text, start = str(found.lastgroup), found[0], at
        at = found.end()
        if kind == "regex":
            body, _, flags = text[1:].rpartition("/")
            where = f"the regex at character {start + 1}"
            yield _Token(kind, text, check_repetitions(body, where, flags))
        elif kind == "text":
            yield _Token(kind, text, _literal(text))
        elif text in ("%json", "%regex", "%llguidance"):
            at = _after_json(lark, at)
            yield _Token("special", text, ANYTHING)
        elif kind not in ("skip", "open"):  # what never closes is not Lark's form
            yield _Token(kind, text, CountedPart(nullable=False, first=TOKEN))


def _after_json(lark: str, at: int) -> int:
    begin = _SPACE.match(lark, at)
    at = begin.end() if begin else at
    try:
        return json.JSONDecoder().raw_decode(lark, at)[1]
    except (ValueError, RecursionError):
        return at  # the compiler says what is wrong


def _literal(text: str) -> CountedPart:
    value = text.removesuffix("i")[1:-1]
    if not value:
        return CountedPart()
    first = value[0]
    if first == "\\":
        return CountedPart(nullable=False, first=ALL)
    both = first.lower() + first.upper() if text.endswith("i") else first
    return CountedPart(nullable=False, first=chars(both))


def _whole(tokens: Sequence[_Token], level: int) -> CountedPart:
    """Return the counts of a nested grammar."""
    if level > MAX_LEVELS:
        raise InvalidRequest(
            f"the grammar has more than {MAX_LEVELS} grammars inside each other: simplify it"
        )
    rules = dict[str, list[_Token]]()
    for name, body in _definitions(_without_inner(tokens, level)):
        rules[name] = [*rules[name], _Token("sign", "|"), *body] if name in rules else [*body]
    known, order = dict[str, CountedPart](), _order(rules)
    for _ in range(ROUNDS):
        for name in order:
            known[name] = _value(rules[name], known)
            check(known[name], f"the rule {name[:80]!r} of the grammar")
    return known.get("start", ANYTHING)


def _without_inner(tokens: Sequence[_Token], level: int) -> list[_Token]:
    """Return the tokens with each nested grammar, `%lark {...}`, as one token."""
    found, at = list[_Token](), 0
    while at < len(tokens):
        if tokens[at].text != "%lark":
            found.append(tokens[at])
            at += 1
            continue
        begin = at = at + 2
        depth = 1
        while at < len(tokens) and depth:
            depth += (tokens[at].text == "{") - (tokens[at].text == "}")
            at += 1
        found.append(_Token("special", "", _whole(tokens[begin : at - 1], level + 1)))
    return found


def _definitions(tokens: Sequence[_Token]) -> Iterator[tuple[str, Sequence[_Token]]]:
    """Yield the rules and terminals, each with the tokens after its colon."""
    begin = 0
    for at in range(len(tokens) + 1):
        continues = at + 1 < len(tokens) and tokens[at + 1].text == "|"
        if at < len(tokens) and (tokens[at].kind != "line" or continues):
            continue
        statement = [token for token in tokens[begin:at] if token.kind != "line"]
        begin = at + 1
        head = next((i for i, token in enumerate(statement) if token.text == ":"), None)
        if head:
            name = next((token for token in statement[:head] if token.kind == "name"), None)
            if name is not None:
                yield name.text.lstrip("!?"), statement[head + 1 :]


def _order(rules: Mapping[str, Sequence[_Token]]) -> list[str]:
    """Return the names in dependency order, except for recursive ones."""
    order, seen = dict[str, None](), set[str]()
    waiting = [*rules][::-1]
    while waiting:
        name = waiting[-1]
        if name in seen:
            order.setdefault(waiting.pop())
            continue
        seen.add(name)
        inner = (token.text for token in rules[name] if token.kind == "name")
        waiting += [text for text in inner if text in rules and text not in seen]
    return [*order]


def _value(body: Sequence[_Token], known: Mapping[str, CountedPart]) -> CountedPart:
    """Return the counts of a rule. `known`: the rules that it names; recursive ones may be
    missing.
    """
    stack, at = Stack(strict=False), 0
    optional, negated = list[bool](), False  # for each open group: it may be left out
    while at < len(body):
        kind, text, part = body[at]
        at += 1
        if kind == "sign" and text in "{~":
            found = _count(body, at, closing=text == "{")
            if found is not None:
                least, most, at = found
                stack.repeat(least, most)
            negated |= found is None and text == "~"
        elif kind == "sign":
            _read_sign(stack, optional, text)
        elif text == "->":
            at += 1  # the name of an alternative
        elif text == ".." and at < len(body):
            stack.top.last = _range(body[at - 2].text, body[at].text)
            at += 1
        elif kind == "name":
            stack.top.add(known.get(text, CountedPart(nullable=False)))
        elif part is not None and kind in ("text", "regex", "special"):
            stack.top.add(part)
    whole = stack.whole()
    return whole._replace(first=ALL, tail=ALL, nullable=True) if negated else whole


def _read_sign(stack: Stack, optional: list[bool], sign: str) -> None:
    if sign in "([":
        stack.open()
        optional.append(sign == "[")
    elif sign in ")]":
        stack.close()
        if optional and optional.pop():
            stack.sign("?")
    elif sign in "|&":
        stack.top.bar()
    elif sign in "*+?":
        stack.sign(sign)


def _count(body: Sequence[_Token], at: int, *, closing: bool) -> tuple[int, int | None, int] | None:
    """Parse a count: its minimum, maximum and end. None without a count."""
    numbers, parts, between = list[int](), 0, ("," if closing else "..")
    while at < len(body) and body[at].kind != "line":
        if body[at].kind == "number" and parts == len(numbers):
            numbers.append(number(body[at].text))
        elif body[at].text == between and not parts:
            parts = 1
            numbers = numbers or [0]
        else:
            break
        at += 1
    if closing and not (at < len(body) and body[at].text == "}"):
        return None
    if not numbers:
        return None
    least = numbers[0]
    most = numbers[1] if len(numbers) > 1 else None if parts else least
    return least, most, at + closing


def _range(low: str, high: str) -> CountedPart:
    first, last = low[1:-1], high[1:-1]
    plain = len(first) == len(last) == 1 and first <= last
    return CountedPart(nullable=False, first=span(first, last) if plain else ALL)
