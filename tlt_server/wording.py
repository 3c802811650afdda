"""Words of errors about values: what a value must be, and the known name that is most like another.

`config` uses them for settings, the frontend for bodies and paths.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Sequence

from pydantic_core import ErrorDetails

from tlt_client.arguments import VERSION, VERSION_MUST

_REQUIREMENTS = {  # pydantic's kind of error -> what it must be or have
    "int_type": "be a whole number",
    "int_parsing": "be a whole number",
    "int_from_float": "be a whole number",
    "int_parsing_size": "be a smaller whole number",
    "float_type": "be a number",
    "float_parsing": "be a number",
    "finite_number": "be a finite number",
    "bool_type": "be true or false",
    "bool_parsing": "be true or false",
    "string_type": "be a string",
    "path_type": "be a path",
    "literal_error": "be {expected}",
    "list_type": "be a list",
    "dict_type": "be an object",
    "model_type": "be an object",
    "model_attributes_type": "be an object",
    "greater_than_equal": "be at least {ge}",
    "greater_than": "be greater than {gt}",
    "less_than_equal": "be at most {le}",
    "less_than": "be less than {lt}",
    "too_short": "have at least {min_length} item{s}",
    "too_long": "have at most {max_length} item{s}",
    "string_too_short": "have at least {min_length} character{s}",
    "string_too_long": "have at most {max_length} character{s}",
}
_PATTERNS = {VERSION: VERSION_MUST}  # those that are better said in words


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint at the most similar known name, or nothing. A prefix that all share (`--`,
    `TLT_`) does not count.
    """
    names = list(known)
    shared = os.path.commonprefix([name, *names]) if len(names) > 1 else ""
    near = difflib.get_close_matches(
        name.removeprefix(shared), [other.removeprefix(shared) for other in names], n=1, cutoff=0.5
    )
    return f"; did you mean {shared}{near[0]}?" if near else ""


def requirement(errors: Sequence[ErrorDetails]) -> str:
    """Return what a value must be or have, in our words. `errors` are pydantic's for one value, one
    per branch of a union.
    """
    return " or ".join(dict.fromkeys(_requirement(error) for error in errors)).replace(
        " or be ", " or "
    )


def _requirement(error: ErrorDetails) -> str:
    if error["type"] == "string_pattern_mismatch":
        return _PATTERNS.get(error["ctx"]["pattern"], f"match {error['ctx']['pattern']}")
    context = {
        name: int(value) if isinstance(value, float) and value.is_integer() else value
        for name, value in error.get("ctx", {}).items()
    }
    plural = "" if 1 in context.values() else "s"
    return _REQUIREMENTS.get(error["type"], "be valid").format(**context, s=plural)
