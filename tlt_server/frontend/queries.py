"""What a client says in the query string: one of a few words, or a list of them. Unknown parameters are ignored."""

from __future__ import annotations

from collections.abc import Collection

from starlette.requests import Request

from tlt_server.errors import InvalidRequest
from tlt_server.frontend.requests import shown

FLAGS = {"true": True, "1": True, "false": False, "0": False}


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
    return FLAGS[word(request, name, FLAGS, "true" if default else "false").lower()]
