"""The JSON of a body, decoded a piece at a time.

Decoding and validation hold the interpreter, in a thread too. So a large object or list is first
cut into its members, which takes a fraction of the time; the members are then decoded one by one,
and other requests run in between.
"""

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
DEPTH = 4  # levels that are cut: body, list of items, item, list of token ids
# Limit on the fields of a large object and on the members of a large list that does not hold
# numbers. No request may have more items.
MAX_MEMBERS = 2**16
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
    """Return the decoded body. `ValueError`: it is not JSON. `InvalidRequest`: an object has too
    many fields, or a list too many members.
    """
    if len(body) <= PIECE_BYTES:
        return from_json(body, allow_inf_nan=False)
    content = await _Decoding().value(body, DEPTH)
    await asyncio.sleep(0)
    return content


class _Decoding:
    def __init__(self) -> None:
        self._bytes = 0  # decoded since other requests last ran

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
        holds_no_numbers = data[1:256].lstrip()[:1] in (b"{", b"[", b'"')
        if data[:1] == b"[" and holds_no_numbers:
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
    if len(members) > MAX_MEMBERS:
        what = (
            "an object in the body has {} fields"
            if kind == dict[str, Raw]
            else "a list in the body has {} members"
        )
        raise InvalidRequest(
            f"{what.format(len(members))}; the limit is {MAX_MEMBERS}: leave out what is not asked "
            "for, or send several requests"
        )
    return members
