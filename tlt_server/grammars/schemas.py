"""The enforced keywords of a JSON schema. A keyword that would be ignored is refused with its path,
since the output might then violate the schema.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping
from fractions import Fraction
from typing import Any

from tlt_server.errors import InvalidRequest
from tlt_server.grammars.compiler import WHITE_SPACE
from tlt_server.grammars.repetitions import check_repetitions
from tlt_server.settings.wording import nearest

ONE = frozenset({"items", "additionalProperties"})  # hold a schema
MANY = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})  # hold a list of schemas
NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions"})  # by name
PLAIN = frozenset(
    "type enum const $ref required minItems maxItems minProperties maxProperties minLength "
    "maxLength pattern format minimum maximum exclusiveMinimum exclusiveMaximum multipleOf".split()
)
# Keywords that say nothing about which values are valid.
ANNOTATIONS = frozenset(
    "title description default examples example deprecated readOnly writeOnly $schema $id id "
    "$comment $anchor contentMediaType contentEncoding discriminator externalDocs xml "
    "propertyOrdering".split()
)
ENFORCED = ONE | MANY | NAMED | PLAIN
# The white space of a schema in a grammar, in the library's own keyword; tags have it.
SPACED = {"x-guidance": {"whitespace_pattern": WHITE_SPACE}}
MAX_SCHEMAS = 4096  # in one schema
MAX_LEVELS = 64
MAX_MULTIPLE = 10_000  # limit on the least common multiple of all multipleOf


def read_json(text: str, what: str = "the JSON schema") -> Any:
    """Return the JSON value of a text. `InvalidRequest` with the position if it is not JSON."""
    try:
        found = json.loads(text, parse_constant=_no_number)
        json.dumps(found, ensure_ascii=False).encode()  # a sender may escape half a character
        return found
    except UnicodeEncodeError:
        raise InvalidRequest(f"{what} has half of a character; write a whole one") from None
    except json.JSONDecodeError as error:
        raise InvalidRequest(
            f"{what} is not JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        ) from None
    except (RecursionError, ValueError):
        raise InvalidRequest(
            f"{what} has too many levels, or a number of too many digits: simplify it"
        ) from None


def _no_number(name: str) -> Any:
    raise ValueError(name)


def check_schema(schema: Any, where: str = "the JSON schema") -> None:
    """Refuse keywords that would be ignored, and sizes that would cost too much."""
    left, multiples = MAX_SCHEMAS, set[Fraction]()
    waiting = [(schema, "", 0)]
    while waiting:
        found, path, level = waiting.pop()
        left -= 1
        if left < 0 or level > MAX_LEVELS:
            raise InvalidRequest(
                f"{where} has more than {MAX_SCHEMAS} schemas or {MAX_LEVELS} levels: simplify it"
            )
        if isinstance(found, bool):
            continue
        if not isinstance(found, dict):
            raise InvalidRequest(
                f"{where} has {json.dumps(found)[:80]} at {path or 'its top'}; a schema is an "
                "object, true or false"
            )
        _check_keywords(found, path, where)
        _check_patterns(found, path, where)
        if (multiple := _multiple(found)) is not None:
            multiples.add(multiple)
            _check_multiples(multiples, path, where)
        waiting += [(part, f"{path}{step}"[-200:], level + 1) for step, part in _parts(found)]


def _check_keywords(schema: Mapping[str, Any], path: str, where: str) -> None:
    for keyword in schema:
        if keyword in ENFORCED or keyword in ANNOTATIONS:
            continue
        if keyword.startswith("x-") and keyword != "x-guidance":
            continue
        if {keyword: schema[keyword]} == SPACED:
            continue
        raise InvalidRequest(
            f"{where} has the keyword {keyword[:80]!r} at {path or 'its top'}, which would be "
            f"ignored{nearest(keyword[:80], sorted(ENFORCED))}: leave it out, and check the output"
        )


def _check_patterns(schema: Mapping[str, Any], path: str, where: str) -> None:
    inner = schema.get("patternProperties")
    for pattern in (schema.get("pattern"), *(inner if isinstance(inner, dict) else ())):
        if isinstance(pattern, str):
            check_repetitions(pattern, f"the pattern at {path or 'the top'} of {where}")


def _multiple(schema: Mapping[str, Any]) -> Fraction | None:
    value = schema.get("multipleOf")
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        return None  # the compiler refuses it
    return Fraction(repr(value))


def _check_multiples(multiples: Collection[Fraction], path: str, where: str) -> None:
    """Bound the automaton of numbers, which may have a state per remainder modulo all of them."""
    scale = math.lcm(*(multiple.denominator for multiple in multiples))
    states = math.lcm(*(int(multiple * scale) for multiple in multiples))
    if states > MAX_MULTIPLE:
        raise InvalidRequest(
            f"{where} has values of multipleOf up to {path or 'its top'} with the least common "
            f"multiple {float(Fraction(states, scale)):g}, which is {states} times their unit; the "
            f"limit is {MAX_MULTIPLE}: leave some out"
        )


def _parts(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the schemas inside a schema, each with its step of the path."""
    for keyword, value in schema.items():
        if keyword in ONE:
            yield f".{keyword}", value
        elif keyword in MANY and isinstance(value, list):
            yield from ((f".{keyword}[{i}]", part) for i, part in enumerate(value))
        elif keyword in NAMED and isinstance(value, dict):
            yield from ((f".{keyword}.{name[:80]}", part) for name, part in value.items())
