"""What a client says in the query string: one of a few words, a list of them, a time. Unknown
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
    """Each of them given once, or several in one, with commas; empty without the parameter."""
    values = [value for given in request.query_params.getlist(name) for value in given.split(",")]
    for value in values:
        if value not in known:
            raise InvalidRequest(f"{name} has {shown(value)}; it must be one of {', '.join(known)}")
    return values


def flag(request: Request, name: str, *, default: bool) -> bool:
    """As trainers' libraries write them, in whatever case: `True` of Python's requests, `true` of
    JSON.
    """
    text = request.query_params.get(name, str(default))
    value = FLAGS.get(text.lower())
    if value is None:
        raise InvalidRequest(f"{name} is {shown(text)}; it must be one of {', '.join(FLAGS)}")
    return value


def seconds(request: Request, name: str, most: float) -> float:
    """0 without the parameter."""
    text = request.query_params.get(name, "0")
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= most:
        raise InvalidRequest(
            f"{name} is {shown(text)}; it must be a number of seconds from 0 to {most:g}: wait again for more"
        )
    return value
