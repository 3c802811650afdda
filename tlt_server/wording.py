"""Words of errors about values: what a value must be, and the known name that is most like another.

`config` uses them for settings, the frontend for the names in bodies and paths.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Sequence

from pydantic_core import ErrorDetails

_REQUIREMENTS = {  # pydantic's kind of error -> what a setting must be
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
    "greater_than_equal": "be at least {ge}",
    "greater_than": "be greater than {gt}",
    "less_than_equal": "be at most {le}",
    "less_than": "be less than {lt}",
}


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
    """Return what a setting must be, in our words. `errors` are pydantic's for one value, one per
    branch of a union.
    """
    return " or ".join(dict.fromkeys(_requirement(error) for error in errors)).replace(
        " or be ", " or "
    )


def _requirement(error: ErrorDetails) -> str:
    context = {
        name: int(value) if isinstance(value, float) and value.is_integer() else value
        for name, value in error.get("ctx", {}).items()
    }
    return _REQUIREMENTS.get(error["type"], "be valid").format(**context)
