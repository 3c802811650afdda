"""Bodies for every struct that a route takes: hostile values of any size at each of its fields."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Struct

from tlt_server.frontend.dialects import DIALECTS
from tlt_server.wire.packed import PackedIds

DEPTH = 3  # levels of fields at which a value is put


def _many(member: str) -> Callable[[int], bytes]:
    return lambda size: ("[" + ",".join([member] * (size // (len(member) + 1))) + "]").encode()


def _deep(opening: str, closing: str) -> Callable[[int], bytes]:
    return lambda size: (opening * (size // 16) + closing * (size // 16)).encode()


def _keys(size: int) -> bytes:
    return ("{" + ",".join(f'"{i:x}":{i % 10}' for i in range(size // 10)) + "}").encode()


# Name -> function of a size, which returns JSON of about that many bytes.
VALUES: dict[str, Callable[[int], bytes]] = {
    **{
        f"list of {name}": _many(member)
        for name, member in {
            "digits": "1",
            "ids": "300",
            "large ids": "123456",
            "negatives": "-1",
            "floats": "1.5",
            "nulls": "null",
            "truths": "true",
            "texts": '"a"',
            "empty texts": '""',
            "lists": "[]",
            "lists of ids": "[1]",
            "objects": "{}",
            "messages": '{"role":"a","content":""}',
            "parts": '{"type":"text","text":""}',
            "names": '{"name":"a"}',
        }.items()
    },
    "a text, then digits": lambda size: b'["a",' + _many("1")(size)[1:],
    "object of digits": _keys,
    "one key again and again": lambda size: (
        "{" + ",".join(['"a":1'] * (size // 6)) + "}"
    ).encode(),
    "long key": lambda size: b'{"' + b"k" * size + b'":1}',
    "text": lambda size: b'"' + b"a" * size + b'"',
    "text with one wide character": lambda size: b'"' + b"a" * size + "\U0001f600".encode() + b'"',
    "list of a wide text": lambda size: b'["' + b"a" * size + "\U0001f600".encode() + b'"]',
    "escapes": lambda size: b'"' + b"\\u4e00" * (size // 6) + b'"',
    "quotes": lambda size: b'"' + b'\\"' * (size // 2) + b'"',
    "commas": lambda size: b'"' + b"," * size + b'"',
    "number": lambda size: b"1" * size,
    "fraction": lambda size: b"0." + b"1" * size,
    "exponent": lambda size: b"1e400",
    "spaces": lambda size: b"[" + b" " * size + b"]",
    "deep lists": _deep("[", "]"),
    "deep objects": _deep('{"a":', "}"),
    "not UTF-8": lambda size: b'"' + b"\xff" * size + b'"',
    "half a surrogate": lambda size: b'"' + b"a" * size + b'\\ud800"',
    "no end": lambda size: b"[" * size,
    "null": lambda size: b"null",
}


class Place(NamedTuple):
    """A field of a body, around which the body is right."""

    name: str
    before: bytes
    after: bytes


def bodies() -> dict[str, Any]:
    """Return every type that a route takes, by name."""
    found = {}
    for dialect in DIALECTS:
        for endpoint in DIALECTS.resolve(dialect):
            for kind in get_args(endpoint.takes) or (endpoint.takes,):
                if isinstance(kind, type):
                    found[kind.__name__] = kind
    return found


def places(kind: type[Struct], depth: int = DEPTH) -> Iterator[Place]:
    """Yield the body itself, an unknown field of it, and each of its fields."""
    yield Place("", b"", b"")
    hints = get_type_hints(kind, include_extras=True)
    fields = msgspec.structs.fields(kind)
    names = [(field.encode_name, hints[field.name], field.name) for field in fields]
    for name, hint, own in [*names, ("unknown", None, "unknown")]:
        others = {
            field.encode_name: sound(hints[field.name])
            for field in fields
            if field.required and field.name != own
        }
        rest = json.dumps(others)[1:].encode()
        before = f'{{"{name}":'.encode()
        after = (b"," if others else b"") + rest
        for inner in _places(hint, depth - 1):
            yield Place(f".{name}{inner.name}", before + inner.before, inner.after + after)


def _places(hint: Any, depth: int) -> Iterator[Place]:
    yield Place("", b"", b"")
    if depth == 0:
        return
    for kind in _structs(hint):
        for place in places(kind, depth):
            if place.name:
                yield place
    for kind in _listed(hint):
        for place in places(kind, depth):
            yield Place(f"[1]{place.name}", b"[" + place.before, place.after + b"]")


def _structs(hint: Any) -> Iterator[type[Struct]]:
    if isinstance(hint, type) and issubclass(hint, Struct) and hint is not PackedIds:
        yield hint
    elif get_origin(hint) is Annotated:
        yield from _structs(get_args(hint)[0])
    elif get_origin(hint) in (Union, UnionType):
        for part in get_args(hint):
            yield from _structs(part)


def _listed(hint: Any) -> Iterator[type[Struct]]:
    if get_origin(hint) is list:
        yield from _structs(get_args(hint)[0])
    elif get_origin(hint) in (Annotated, Union, UnionType):
        for part in get_args(hint):
            yield from _listed(part)


def sound(hint: Any) -> Any:
    """Return a value of a type."""
    origin = get_origin(hint)
    if origin is Annotated:
        return sound(get_args(hint)[0])
    if origin in (Union, UnionType):
        return sound(next(part for part in get_args(hint) if part is not NoneType))
    if origin is list:
        return [sound(get_args(hint)[0])]
    if origin is dict:
        return {}
    if hint is PackedIds:
        return [1]
    if isinstance(hint, type) and issubclass(hint, Struct):
        hints = get_type_hints(hint, include_extras=True)
        fields = msgspec.structs.fields(hint)
        return {field.encode_name: sound(hints[field.name]) for field in fields if field.required}
    return get_args(hint)[0] if get_args(hint) else {str: "a", int: 2}.get(hint, 1)
