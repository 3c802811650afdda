"""Closes objects of a JSON schema that list their properties: they get no others, unless the schema
allows them.

A schema that is silent about further properties allows them, and weak models then write keys until
their tokens end. Schemas that apply to one value, through `allOf` and references next to other
keywords, are closed together: each part alone would forbid the properties of the others.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from tlt_server.errors import InvalidRequest
from tlt_server.grammars.schemas import ANNOTATIONS, MAX_LEVELS, MAX_SCHEMAS, NAMED, ONE

OPENS = frozenset({"additionalProperties", "patternProperties", "unevaluatedProperties"})
SAME_VALUE = frozenset({"allOf", "anyOf", "oneOf"})
DEFINITIONS = frozenset({"$defs", "definitions"})
LIMIT = 4 * MAX_SCHEMAS


def closed(schema: Any) -> Any:
    """Return a schema, checked by `check_schema`, with its objects closed."""
    return _Closer(schema).close(schema)


@dataclass
class _Whole:
    """The properties named by all schemas of one value, and whether it may have others."""

    names: dict[str, None] = field(default_factory=dict)
    is_open: bool = False
    least: int = 0  # properties that it must have


class _Closer:
    def __init__(self, root: Any) -> None:
        self._root, self._left = root, LIMIT

    def close(self, schema: Any) -> Any:
        if not isinstance(schema, dict):
            return schema
        self._count(0)
        if not self._lists(schema, ()):
            return {
                keyword: [*map(self.close, value)]
                if keyword in SAME_VALUE and isinstance(value, list)
                else self._inner(keyword, value)
                for keyword, value in schema.items()
            }
        whole = _Whole()
        found = self._joined(schema, whole, ())
        if not whole.is_open and whole.least <= len(whole.names):
            found["properties"] = dict.fromkeys(whole.names, True) | found.get("properties", {})
            found["additionalProperties"] = False
        return found

    def _lists(self, schema: Any, refs: Collection[str]) -> bool:
        """Return True if a schema, or a part of it that always applies, lists properties. A pure
        reference does not: it is closed at its definition.
        """
        self._count(len(refs))
        if not isinstance(schema, dict):
            return False
        if isinstance(schema.get("properties"), dict):
            return True
        parts = schema.get("allOf")
        parts = parts if isinstance(parts, list) else []
        said = schema.keys() - ANNOTATIONS - DEFINITIONS
        if not refs and (said == {"$ref"} or (said == {"allOf"} and len(parts) == 1)):
            return False
        refs = (*refs, "")
        if any(self._lists(part, refs) for part in parts):
            return True
        ref = schema.get("$ref")
        return ref not in refs and self._lists(self._target(ref), (*refs, str(ref)))

    def _joined(self, schema: Any, whole: _Whole, refs: Collection[str]) -> Any:
        """Return a schema that is left open itself, with inner schemas closed, and add its property
        names to `whole` in order.
        """
        self._count(len(refs))
        if not isinstance(schema, dict):
            return schema
        whole.is_open |= not OPENS.isdisjoint(schema)
        found, target = dict[str, Any](), None
        for keyword, value in schema.items():
            if keyword in SAME_VALUE and isinstance(value, list):
                found[keyword] = [self._joined(part, whole, refs) for part in value]
            elif keyword == "$ref" and isinstance(value, str):
                target = self._joined_target(value, whole, refs)
            else:
                found[keyword] = self._inner(keyword, value)
            if keyword == "properties" and isinstance(value, dict):
                whole.names |= dict.fromkeys(value)
            elif keyword == "minProperties" and isinstance(value, int):
                whole.least = max(whole.least, value)
        required = schema.get("required")
        if isinstance(required, list):
            whole.names |= dict.fromkeys(name for name in required if isinstance(name, str))
        if target is not None:
            found["allOf"] = [*found.get("allOf", []), target]
        return found

    def _joined_target(self, ref: str, whole: _Whole, refs: Collection[str]) -> Any:
        target = None if ref in refs else self._target(ref)
        if not isinstance(target, dict):
            whole.is_open = True
            return {"$ref": ref}
        part = {name: target[name] for name in target if name not in DEFINITIONS}
        return self._joined(part, whole, (*refs, ref))

    def _inner(self, keyword: str, value: Any) -> Any:
        """Return a keyword's value, with the schemas of members and items closed."""
        if keyword in ONE:
            return self.close(value)
        if keyword == "prefixItems" and isinstance(value, list):
            return [*map(self.close, value)]
        if keyword in NAMED and isinstance(value, dict):
            return {name: self.close(part) for name, part in value.items()}
        return value

    def _target(self, ref: Any) -> Any:
        """Return the schema that a reference within the document points to, or None."""
        if not isinstance(ref, str) or not ref.startswith("#"):
            return None
        found = self._root
        for step in ref.removeprefix("#").split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
                found = found[int(name)]
            else:
                found = found.get(name) if isinstance(found, dict) else None
        return found

    def _count(self, level: int) -> None:
        self._left -= 1
        if self._left < 0 or level > MAX_LEVELS:
            raise InvalidRequest(
                f"the JSON schema has more than {LIMIT} schemas or {MAX_LEVELS} levels where the "
                "references of its allOf are followed: simplify it"
            )
