"""The wording of errors about values: the requirement, and the most similar known name.

`config` uses it for settings, the frontend for the names in bodies and paths.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from pydantic_core import ErrorDetails

if TYPE_CHECKING:  # most who look for a name need no settings
    from tlt_server.settings.server import Setting

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
    """Return a hint at the most similar known name, or nothing. A common prefix (`--`, `TLT_`) does
    not count.
    """
    names = list(known)
    shared = os.path.commonprefix([name, *names]) if len(names) > 1 else ""
    near = difflib.get_close_matches(
        name.removeprefix(shared), [other.removeprefix(shared) for other in names], n=1, cutoff=0.5
    )
    return f"; did you mean {shared}{near[0]}?" if near else ""


def bad_value(setting: Setting, errors: Sequence[ErrorDetails], source: str) -> str:
    """Return what is wrong with a setting's value, or that it is missing. `errors`: pydantic's."""
    error, doc = errors[0], setting.doc
    if error["type"] == "missing":
        return (
            f"{setting.name} is not set; give {setting.flag}, {setting.variable} or the key "
            f"{setting.name}: {doc.sentence}"
        )
    must = requirement(errors)
    if doc.auto:
        more = ", " if " or " in must else " or "
        must = (
            must.replace("be '", f"be 'auto'{more}'", 1) if "be '" in must else f"{must} or 'auto'"
        )
    if doc.low is not None and doc.high is not None:
        must = "be" if error["type"] == "value_error" else f"{must},"
        must += f" from {plain(doc.low)} to {plain(doc.high)}"
    return (
        f"{setting.name} is {str(error['input'])[:80]!r} ({source}); it must {must} "
        f"({doc.unit}). {doc.sentence}"
    )


def plain(number: float) -> str:
    return str(int(number)) if float(number).is_integer() else f"{number:g}"


def requirement(errors: Sequence[ErrorDetails]) -> str:
    """Return the requirement of a setting, in our words. `errors`: pydantic's for one value, one
    per branch of a union.
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
