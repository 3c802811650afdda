"""Bodies of requests, parsed into their structs: `parse` is the only way in.

It stops at the first thing that is wrong, and makes no object of a list that is too long, so a
refusal costs little more memory than the body and a few nanoseconds per byte. It needs nothing but
the body and the limits, so it may run in any process.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Generic, NamedTuple, TypeVar, cast

import msgspec
from msgspec import UNSET, DecodeError, Raw, UnsetType
from msgspec.json import Decoder

from tlt_server.errors import InvalidRequest
from tlt_server.frontend.http.bounds import Bounds
from tlt_server.frontend.http.objects import ANY, ObjectReader
from tlt_server.frontend.http.readers import NULL
from tlt_server.frontend.http.wrong import Wrong, shown_text

_SPACE = re.compile(rb"[ \t\r\n]*")
Body = TypeVar("Body", covariant=True)


class Forms(NamedTuple, Generic[Body]):
    """The forms of the bodies of one route, told apart by the fields that they have.

    `choose` gets those of `names` that there are, each with whether it is null. The form that it
    returns may leave the others unread.
    """

    names: tuple[str, ...]
    choose: Callable[[Mapping[str, bool]], type[Body]]


def parse(kind: type[Body] | Forms[Body], body: bytes | bytearray, bounds: Bounds) -> Body:
    """Return the struct of a body. `TltError`: the body is none, and the message says why."""
    text = memoryview(body)
    try:
        names = kind.names if isinstance(kind, Forms) else ()
        content = _object(text, kind)
        form: Any = kind.choose(_null(kind, content)) if isinstance(kind, Forms) else kind
        return cast(Body, _reader(form, bounds, names).read(content))
    except Wrong as wrong:
        raise wrong.error() from None
    except RecursionError:
        raise _no_json("it is nested too deeply") from None
    except DecodeError as error:
        raise _no_json(str(error)) from None


def any_json(text: str) -> Any:
    """Return what a text of JSON holds, of which no type is known. `InvalidRequest`: it is none, or
    too large.
    """
    try:
        return ANY.read(memoryview(text.strip().encode("utf-8", "replace")))
    except (Wrong, IndexError, RecursionError):
        raise _no_json("a text in it is none") from None


def _null(forms: Forms[Any], text: memoryview) -> dict[str, bool]:
    found = _outline(forms.names).decode(text)
    texts = {name: getattr(found, name) for name in forms.names}
    return {name: memoryview(text) == NULL for name, text in texts.items() if text is not UNSET}


def _object(text: memoryview, kind: Any) -> memoryview:
    """Return the text of an object, which begins with its brace."""
    space = _SPACE.match(text)
    content = text[space.end() :] if space else text
    if bytes(content[:1]) != b"{":
        value = memoryview(msgspec.json.decode(text, type=Raw))
        raise InvalidRequest(
            f"the body is {shown_text(value)}; it must be a JSON object with the field "
            f"{_needed(kind)}"
        )
    return content


def _needed(kind: Any) -> str:
    """Return the name of a field that a body must have, or may have if it need not have any."""
    if isinstance(kind, Forms):
        return kind.names[0]
    fields = msgspec.structs.fields(kind)
    names = [field.encode_name for field in fields if field.required]
    return next(iter((*names, *(field.encode_name for field in fields), "nothing")))


def _no_json(why: str) -> InvalidRequest:
    return InvalidRequest(f"the body is not JSON: {why}; send one UTF-8 encoded JSON object")


@lru_cache(maxsize=256)
def _reader(kind: type[Any], bounds: Bounds, ignored: tuple[str, ...] = ()) -> ObjectReader:
    return ObjectReader(kind, bounds, ignored)


@lru_cache(maxsize=32)
def _outline(names: tuple[str, ...]) -> Decoder[Any]:
    return Decoder(msgspec.defstruct("Form", [(name, Raw | UnsetType, UNSET) for name in names]))
