"""Parameters of the query string: a word, a list of words, a flag, a count, a time. Unknown
parameters are ignored.
"""

from __future__ import annotations

from collections.abc import Collection

from starlette.requests import Request

from tlt_server.errors import InvalidRequest
from tlt_server.frontend.http.fields import shown

FLAGS = {
    "true": True,
    "1": True,
    "yes": True,
    "on": True,
    "false": False,
    "0": False,
    "no": False,
    "off": False,
}


def word(request: Request, name: str, known: Collection[str], default: str) -> str:
    value = request.query_params.get(name, default)
    if value not in known:
        raise InvalidRequest(f"{name} is {shown(value)}; it must be one of {', '.join(known)}")
    return value


def words(request: Request, name: str, known: Collection[str]) -> list[str]:
    """Return the words given, in one parameter with commas or in several; empty without one."""
    values = [value for given in request.query_params.getlist(name) for value in given.split(",")]
    for value in values:
        if value not in known:
            raise InvalidRequest(f"{name} has {shown(value)}; it must be one of {', '.join(known)}")
    return values


def flag(request: Request, name: str, *, default: bool) -> bool:
    """Return a flag in any case, since trainers send `True` of Python as well as `true` of JSON."""
    text = request.query_params.get(name, str(default))
    value = FLAGS.get(text.lower())
    if value is None:
        raise InvalidRequest(f"{name} is {shown(text)}; it must be one of {', '.join(FLAGS)}")
    return value


def count(request: Request, name: str, least: int, most: int, default: int) -> int:
    """Return a whole number in decimal digits."""
    text = request.query_params.get(name, str(default))
    digits = text.isascii() and text.isdigit() and len(text) <= len(str(most))
    if not digits or not least <= int(text) <= most:
        raise InvalidRequest(
            f"{name} is {shown(text)}; it must be a whole number from {least} to {most}"
        )
    return int(text)


def seconds(request: Request, name: str, max_s: float) -> float:
    """Return a time in seconds; 0 without the parameter."""
    text = request.query_params.get(name, "0")
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= max_s:
        raise InvalidRequest(
            f"{name} is {shown(text)}; it must be a number of seconds from 0 to {max_s:g}: wait "
            "again for more"
        )
    return value
