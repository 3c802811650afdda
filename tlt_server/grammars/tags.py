"""Structural tags: free text in which triggers begin tags, whose content must match a schema. They
are converted to a grammar in Lark's form.

The older form (`structures` and `triggers`) and the newer one (`format`, a tree) are read. In free
text the first trigger begins a tag. A special token of the model is one token in a tag.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from tlt_server.errors import InvalidRequest
from tlt_server.grammars.closing import closed
from tlt_server.grammars.gbnf import as_lark
from tlt_server.grammars.schemas import MAX_LEVELS, SPACED, check_schema

MAX_PARTS = 1024
TEXT = r"/(.|\n)*/"
Specials = Mapping[str, int]  # special tokens of the model, with their ids


def lark_of_tags(content: Any, specials: Specials) -> str:
    """Return the grammar of a structural tag."""
    if not isinstance(content, dict):
        raise _wrong("structural_tag", content, "be an object")
    return _Writer(specials).whole(format_of(content))


def format_of(content: dict[str, Any]) -> Any:
    """Return a structural tag in the newer form."""
    if "format" in content:
        return content["format"]
    tags = []
    for each in _get(content, "structures", list, "structural_tag"):
        begin, end = (_get(each, name, str, "structures") for name in ("begin", "end"))
        schema = {"type": "json_schema", "json_schema": each.get("schema", {})}
        tags.append({"begin": begin, "content": schema, "end": end})
    triggers = _get(content, "triggers", list, "structural_tag")
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags}


class _Writer:
    def __init__(self, specials: Specials) -> None:
        self._specials, self._rules, self._parts, self._level = specials, list[str](), 0, 0
        self._special = (
            re.compile("|".join(map(re.escape, sorted(specials, key=len, reverse=True))))
            if specials
            else None
        )
        self._kinds: Mapping[str, Callable[[dict[str, Any]], str]] = {
            "const_string": lambda part: self._literal(_get(part, "value", str)),
            "json_schema": self._schema,
            "regex": lambda part: self._regex(_get(part, "pattern", str)),
            "grammar": lambda part: f"%lark {{\n{as_lark(_get(part, 'grammar', str))}\n}}",
            "sequence": lambda part: " ".join(self._elements(part)),
            "or": lambda part: " | ".join(self._elements(part)),
            "tag": self._tag,
            "triggered_tags": self._triggered,
            "tags_with_separator": self._separated,
        }

    def whole(self, format: Any) -> str:
        start = self._part(format)
        return "\n".join(["%llguidance {}", f"start: {start}", *self._rules, f"TEXT: {TEXT}"])

    def _part(self, part: Any) -> str:
        """Return the rule name of one part of the tree."""
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise InvalidRequest(f"structural_tag has more than {MAX_PARTS} parts: simplify it")
        if not isinstance(part, dict):
            raise _wrong("format", part, "be an object with a type")
        kind = part.get("type")
        if kind == "any_text":
            return "TEXT"
        if not isinstance(kind, str) or kind not in self._kinds:
            known = ", ".join([*self._kinds, "any_text"])
            raise _wrong("type", kind, f"be one of {known}")
        self._level += 1
        if self._level > MAX_LEVELS:
            raise InvalidRequest(f"structural_tag has more than {MAX_LEVELS} levels: simplify it")
        body = self._kinds[kind](part)
        self._level -= 1
        return self._rule(body)

    def _rule(self, body: str, attribute: str = "") -> str:
        name = f"part_{len(self._rules)}"
        self._rules.append(f"{name}{attribute}: {body}")
        return name

    def _elements(self, part: dict[str, Any]) -> list[str]:
        elements = [self._part(each) for each in _get(part, "elements", list)]
        if not elements:
            raise _wrong("elements", [], "have at least one")
        return elements

    def _schema(self, part: dict[str, Any]) -> str:
        schema = part.get("json_schema", {})
        check_schema(schema, "the JSON schema of a tag")
        if not isinstance(schema, dict):
            schema = {}
        return f"%json {json.dumps(closed(schema) | SPACED)}"

    @staticmethod
    def _regex(pattern: str) -> str:
        def escaped(found: re.Match[str]) -> str:
            return {"/": r"\/", "\n": r"\n"}.get(found[0].removeprefix("\\"), found[0])

        body = re.sub(r"\\.|/|\n", escaped, pattern, flags=re.DOTALL)
        return f"/{body}/" if body else '""'

    def _tag(self, part: dict[str, Any], begun: str = "") -> str:
        """Return the body of a tag, without the text that began it."""
        begin = _get(part, "begin", str).removeprefix(begun)
        content, end = part.get("content"), part.get("end", "")
        ends = [end] if isinstance(end, str) else end
        if not isinstance(ends, list) or not ends or any(not isinstance(e, str) for e in ends):
            raise _wrong("end", end, "be a string")
        if isinstance(content, dict) and content.get("type") == "any_text":
            return f"{self._literal(begin)} ({' | '.join(map(self._until, ends))})"
        closing = " | ".join(self._literal(e) or '""' for e in ends)
        return f"{self._literal(begin)} {self._part(content)} ({closing})"

    def _triggered(self, part: dict[str, Any]) -> str:
        triggers, bodies = _get(part, "triggers", list), list[str]()
        for tag in _get(part, "tags", list):
            begin = _get(tag, "begin", str, "tags")
            begun = next((t for t in triggers if isinstance(t, str) and begin.startswith(t)), "")
            if not begun:
                raise _wrong("begin", begin, "begin with one of the triggers")
            bodies.append(f"{self._until(begun)} {self._tag(tag, begun)}")
        if not bodies:
            raise _wrong("tags", [], "have at least one")
        tags = self._rule(" | ".join(bodies))
        if part.get("stop_after_first"):
            return tags
        return f"{tags}{'+' if part.get('at_least_one') else '*'} TEXT"

    def _until(self, text: str) -> str:
        """Return the rule of free text up to and including the first occurrence of `text`."""
        first, *rest = self._pieces(text) or [""]
        if first.startswith('"'):
            first = self._rule(f"TEXT {first}", "[lazy]")
            return " ".join([first, *rest])
        return " ".join(["TEXT", first, *rest])

    def _separated(self, part: dict[str, Any]) -> str:
        tags = self._rule(" | ".join(self._tag(tag) for tag in _get(part, "tags", list)))
        separator = self._literal(_get(part, "separator", str))
        many = tags if part.get("stop_after_first") else f"{tags} ({separator} {tags})*"
        return many if part.get("at_least_one") else f"({many})?"

    def _literal(self, text: str) -> str:
        """Return a text as Lark literals, with special tokens by their ids."""
        return " ".join(self._pieces(text))

    def _pieces(self, text: str) -> list[str]:
        pieces, at = list[str](), 0
        for found in self._special.finditer(text) if self._special else ():
            pieces += [_quoted(text[at : found.start()]), f"<[{self._specials[found[0]]}]>"]
            at = found.end()
        return [piece for piece in (*pieces, _quoted(text[at:])) if piece]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _get(part: Any, name: str, kind: type, where: str = "format") -> Any:
    value = part.get(name) if isinstance(part, dict) else None
    if not isinstance(value, kind):
        raise _wrong(f"{where}.{name}", value, "be a string" if kind is str else "be a list")
    return value


def _wrong(name: str, value: Any, requirement: str) -> InvalidRequest:
    return InvalidRequest(f"{name} is {json.dumps(value)[:80]}; it must {requirement}")
