"""JSON of a body, decoded a piece at a time: what decodes or validates holds the interpreter
meanwhile, in a thread as well.

A large object or list is first cut into its members, which takes a fraction of the time; the
members are decoded one after another, and other requests have their turn in between."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

import msgspec
from msgspec import Raw
from pydantic_core import from_json
from starlette.requests import Request

from tlt_server.errors import InvalidRequest
from tlt_server.frontend.http.fields import Model, checked, shown

PIECE_BYTES = 2**18
DEPTH = 4  # of what is cut: body, list of items, item, list of token ids
MOST = (
    2**16
)  # fields of a large object, members of a large list but of numbers: as many items as a request may have, at the most
Cut = TypeVar("Cut", dict[str, Raw], list[Raw])


async def read_object(body: bytes, field: str) -> dict[str, Any]:
    """Return the JSON object in a body. `field` is a field that it needs, which the error names."""
    try:
        content = await decoded(body)
    except ValueError as error:
        raise InvalidRequest(
            f"the body is not JSON: {error}; send one UTF-8 encoded JSON object"
        ) from None
    if not isinstance(content, dict):
        raise InvalidRequest(
            f"the body is {shown(content)}; it must be a JSON object with the field {field}"
        )
    return content


async def optional_object(body: bytes, field: str) -> dict[str, Any]:
    """Read the JSON object of a body that may be left out, which means an empty object."""
    return await read_object(body, field) if body else {}


async def read_optional(model: type[Model], request: Request) -> Model:
    """Check the object of a body that may be left out, which means an empty object."""
    field = next(iter(model.model_fields), "nothing")
    return checked(model, await optional_object(await request.body(), field))


async def decoded(body: bytes) -> Any:
    """`ValueError` when it is not JSON, `InvalidRequest` when an object has too many fields or a
    list too many members.
    """
    if len(body) <= PIECE_BYTES:
        return from_json(body, allow_inf_nan=False)
    content = await _Decoding().value(body, DEPTH)
    await asyncio.sleep(0)
    return content


class _Decoding:
    def __init__(self) -> None:
        self._bytes = 0  # since others had their turn

    async def value(self, data: bytes, depth: int) -> Any:
        if len(data) <= PIECE_BYTES or depth == 0:
            return await self._whole(data)
        data = data.strip()
        if data[:1] == b"{":
            fields = _cut(data, dict[str, Raw])
            await asyncio.sleep(0)
            return {
                name: await self.value(bytes(field), depth - 1) for name, field in fields.items()
            }
        if data[:1] == b"[" and data[1:256].lstrip()[:1] in (
            b"{",
            b"[",
            b'"',
        ):  # not where numbers stand
            members = _cut(data, list[Raw])
            await asyncio.sleep(0)
            return [await self.value(bytes(member), depth - 1) for member in members]
        return await self._whole(data)

    async def _whole(self, data: bytes) -> Any:
        self._bytes += len(data)
        if self._bytes > PIECE_BYTES:
            await asyncio.sleep(0)
            self._bytes = 0
        return from_json(data, allow_inf_nan=False)


def _cut(data: bytes, kind: type[Cut]) -> Cut:
    try:
        members = msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(str(error)) from None
    if len(members) > MOST:
        what = (
            "an object in the body has {} fields"
            if kind == dict[str, Raw]
            else "a list in the body has {} members"
        )
        raise InvalidRequest(
            f"{what.format(len(members))}; the limit is {MOST}: leave out what is not asked for, or send several requests"
        )
    return members
