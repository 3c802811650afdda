"""The forms of structures in requests, each turned into a `records.Grammar`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType

from tlt_server.errors import InvalidRequest
from tlt_server.grammars.closing import closed
from tlt_server.grammars.gbnf import as_lark
from tlt_server.grammars.lark_repetitions import check_lark
from tlt_server.grammars.repetitions import check_repetitions
from tlt_server.grammars.schemas import check_schema, read_json
from tlt_server.grammars.tags import Specials, lark_of_tags
from tlt_server.wire.records import Grammar

NO_SPECIALS: Specials = MappingProxyType({})
MAX_CHARS = 2**18 - 1  # in Lark's form, which may be longer than what was asked for
MAX_RULES = 1024  # limit on a grammar; the library descends once per rule
_RULE = re.compile(r"^[ \t]*[?!]?[A-Za-z_]\w*(?:\.-?\d+)?(?:\[[^\]\n]*\])?[ \t]*:", re.MULTILINE)
_JSON = re.compile(r"%json\b\s*")
# Attributes of rules that the sampler here would not follow. No search passes a bracket twice.
_UNFOLLOWED = re.compile(r"\[[^\]\[\n]*\b(max_tokens|temperature)\s*=")


def grammar_of(form: str, text: str, specials: Specials = NO_SPECIALS) -> Grammar:
    """Return the grammar of a text in one of `FORMS`. `InvalidRequest` for errors that show before
    the compilation. `specials`: the model's special tokens.
    """
    if form == "structural_tag":
        found = _grammar(lark_of_tags(read_json(text, "the structural tag"), specials))
    else:
        found = FORMS[form](text)
    return _bounded(found)


def check_grammar(grammar: Grammar) -> None:
    """Raise `InvalidRequest` for a grammar that is invalid or may cost too much."""
    (_grammar if grammar.kind == "lark" else FORMS[grammar.kind])(_bounded(grammar).text)


def _bounded(grammar: Grammar) -> Grammar:
    if len(grammar.text) > MAX_CHARS:
        raise InvalidRequest(
            f"the grammar has {len(grammar.text)} characters; the limit is {MAX_CHARS}: simplify it"
        )
    return grammar


def _json_schema(text: str) -> Grammar:
    schema = read_json(text)
    check_schema(schema)
    found = closed(schema)
    text = text if found == schema else json.dumps(found, ensure_ascii=False, separators=(",", ":"))
    return Grammar(kind="json_schema", text=text)


def _regex(text: str) -> Grammar:
    check_repetitions(text)
    return Grammar(kind="regex", text=text)


def _choice(text: str) -> Grammar:
    choices = dict.fromkeys(json.loads(text))
    return Grammar(kind="lark", text=f"start: {' | '.join(map(quoted, choices))}")


def _grammar(text: str) -> Grammar:
    lark = as_lark(text)
    rules = len(_RULE.findall(lark))
    if rules > MAX_RULES:
        raise InvalidRequest(
            f"the grammar has {rules} rules; the limit is {MAX_RULES}: simplify it"
        )
    if found := _UNFOLLOWED.search(lark):
        raise InvalidRequest(
            f"the grammar has the attribute {found[1]!r} at character {found.start(1) + 1}, which "
            "would be ignored: leave it out"
        )
    check_lark(lark)
    for at in _JSON.finditer(lark):
        _check_inner(lark, at.end())
    return Grammar(kind="lark", text=lark)


def _check_inner(lark: str, begin: int) -> None:
    """Check the JSON schema that begins at this position of a grammar."""
    try:
        _, end = json.JSONDecoder().raw_decode(lark, begin)
    except (ValueError, RecursionError):
        raise InvalidRequest(
            f"the grammar has no JSON schema after %json at character {begin + 1}"
        ) from None
    what = f"the JSON schema at character {begin + 1} of the grammar"
    check_schema(read_json(lark[begin:end], what), what)


def quoted(text: str) -> str:
    """Return a text as a literal in Lark's form."""
    return json.dumps(text, ensure_ascii=False)


FORMS: Mapping[str, Callable[[str], Grammar]] = {
    "json_schema": _json_schema,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
}
