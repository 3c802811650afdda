"""The way from the bytes of a body to its struct.

A body that is small and simple is parsed at once, any other by the reading process. Its parts are
counted first, since 64 KiB of tiny objects take 30 ms and a text of that size takes none.
"""

from __future__ import annotations

import asyncio
import hashlib
from typing import TypeVar, cast

from tlt_server.frontend.http.counting import Bounds
from tlt_server.frontend.http.parsing import Forms, parse
from tlt_server.frontend.reading.asking import ask
from tlt_server.frontend.reading.frames import sliced
from tlt_server.frontend.reading.jobs import Slice
from tlt_server.frontend.reading.trees import name_of, named

# Limits on what is parsed at once; on a slow core it takes up to 3 ms.
INLINE_BYTES = 2**16
INLINE_OBJECTS = 128  # with lists
INLINE_QUOTES = 2**12
DIGEST_BYTES = 2**20  # hashed at once, which takes 1 ms

Body = TypeVar("Body")


class Bodies:
    """Reads bodies within the server's limits."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds

    async def read(self, kind: type[Body] | Forms[Body], body: bytes) -> Body:
        if _is_simple(body):
            return parse(kind, body, self._bounds)
        names = kind.names if isinstance(kind, Forms) else None
        name = name_of(kind.choose if isinstance(kind, Forms) else kind)
        arguments = (PARSED_APART, name, names, self._bounds.values())
        slices = [Slice(("parse", *arguments), lambda: sliced([body]))]
        [value] = await ask(slices, total=len(body), largest=len(body))
        return cast(Body, value)


def _is_simple(body: bytes) -> bool:
    return (
        len(body) <= INLINE_BYTES
        and body.count(b"{") + body.count(b"[") <= INLINE_OBJECTS
        and body.count(b'"') <= INLINE_QUOTES
    )


def parsed_apart(body: bytearray, name: str, names: list[str] | None, bounds: list[int]) -> object:
    """Return what `parse` does: a job of the reading process."""
    found = named(name)
    kind = found if names is None else Forms[object](tuple(names), found)
    return parse(kind, body, Bounds(*bounds))


PARSED_APART = name_of(parsed_apart)


async def digest(body: bytes) -> str:
    """Return the SHA-256 of a body, while other requests run."""
    sum = hashlib.sha256()
    view = memoryview(body)
    for at in range(0, len(body), DIGEST_BYTES):
        sum.update(view[at : at + DIGEST_BYTES])
        await asyncio.sleep(0)
    return sum.hexdigest()
