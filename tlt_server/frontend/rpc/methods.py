"""The table of gRPC methods and their HTTP operations.

The content of a message becomes path, query and body. The types of messages are those of the
service in `clients/proto/rollout.proto`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode

import msgspec
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from tlt_client.rpc.rollout_pb2 import DESCRIPTOR
from tlt_server.errors import InvalidRequest
from tlt_server.frontend.dialects.operate import MAX_WAIT_S
from tlt_server.frontend.http.arrival import Arrived
from tlt_server.frontend.http.fields import shown
from tlt_server.frontend.http.slices import json_slices
from tlt_server.frontend.reading.asking import ask
from tlt_server.frontend.reading.frames import sliced
from tlt_server.frontend.reading.jobs import Slice
from tlt_server.frontend.rpc.messages import parsed, plain, read, weigh

SERVICE = DESCRIPTOR.services_by_name["RolloutService"]
NOTHING: Mapping[str, Any] = MappingProxyType({})


class Operation(NamedTuple):
    """An HTTP operation, with the places of a message's content in it."""

    method: str
    path: str
    fixed: Mapping[str, Any] = NOTHING  # what the gRPC method implies; its message has no field
    ranged: bool = False  # the content is a range of a file

    @property
    def in_query(self) -> bool:
        """True if the content goes into the query, not into the body."""
        return self.method in ("GET", "DELETE")

    def arrived(self, content: dict[str, Any]) -> tuple[Arrived, Iterable[bytes]]:
        """Return the parts of the same request over HTTP, and its body in slices."""
        content |= self.fixed
        path = re.sub(
            r"{(\w+)(:path)?}",
            lambda match: _segment(match[1], content.pop(match[1], ""), match[2] is not None),
            self.path,
        )
        path = path.replace("//", "/")  # an empty segment is left out
        if path.endswith("/"):
            name = self.path.rpartition("{")[2].partition("}")[0].partition(":")[0]
            raise InvalidRequest(f"{name} is empty; send the {name} that is meant")
        if self.ranged:
            return _part(path, **content)
        if not self.in_query:
            return Arrived(self.method, path), json_slices(content)
        query = {
            name: msgspec.json.encode(value).decode() if not isinstance(value, str) else value
            for name, value in content.items()
        }
        return Arrived(self.method, path, query=urlencode(query, quote_via=quote)), ()


def _segment(name: str, value: str, several: bool) -> str:
    """Check that a value can be one segment of a path, or several if `several`."""
    if "/" in value and not several:
        raise InvalidRequest(
            f"{name} is {shown(value)}; it must have no '/', as it is a part of a path"
        )
    return value


def _part(
    path: str, start: int = 0, total: int | None = None, data: bytes = b""
) -> tuple[Arrived, Iterable[bytes]]:
    """Return a range of a file; its position goes into a header."""
    total = start + len(data) if total is None else total
    headers = (
        ("content-length", str(len(data))),
        ("content-range", f"bytes {start}-{start + len(data) - 1}/{total}"),
    )
    return Arrived("PUT", path, headers=headers), sliced([data])


OPERATIONS: dict[str, Operation] = {
    "Generate": Operation("POST", "/generate", {"stream": True}),
    "GenerateBatch": Operation("POST", "/generate"),
    "Detach": Operation("POST", "/generate", {"detach": True}),
    "ListRollouts": Operation("GET", "/rollouts"),
    "GetRollout": Operation("GET", "/rollouts/{id}"),
    "DeleteRollout": Operation("DELETE", "/rollouts/{id}"),
    "Pause": Operation("POST", "/engine/pause"),
    "Resume": Operation("POST", "/engine/resume"),
    "Sleep": Operation("POST", "/engine/sleep"),
    "Wake": Operation("POST", "/engine/wake"),
    "ClearCache": Operation("POST", "/engine/clear_cache"),
    "Abort": Operation("POST", "/engine/abort"),
    "GetStrategy": Operation("GET", "/strategy"),
    "SetStrategy": Operation("PUT", "/strategy"),
    "GetPart": Operation("GET", "/weights/{version}/{part}"),
    "JoinGroup": Operation("POST", "/weight_groups"),
    "LeaveGroup": Operation("DELETE", "/weight_groups/{name}"),
    "CommitWeights": Operation("POST", "/weights/{version}/commit"),
    "AbortWeights": Operation("POST", "/weights/{version}/abort"),
    "Rollback": Operation("POST", "/weights/rollback"),
    "UnloadAdapter": Operation("DELETE", "/adapters/{name:path}"),
    "GetWeights": Operation("GET", "/weights"),
    "GetFleet": Operation("GET", "/fleet"),
    "DrainReplica": Operation("POST", "/fleet/{name}/{order}", {"order": "drain"}),
    "ResumeReplica": Operation("POST", "/fleet/{name}/{order}", {"order": "resume"}),
    "RestartReplica": Operation("POST", "/fleet/{name}/{order}", {"order": "restart"}),
    "ScaleFleet": Operation("POST", "/fleet/replicas"),
    "GetInfo": Operation("GET", "/server_info"),
    "WatchEvents": Operation("GET", "/events", {"wait_s": MAX_WAIT_S}),
}
UPDATES: dict[str, Operation] = {  # content of a message of UpdateWeights -> its operation
    "part": Operation("PUT", "/weights/{version}/{part}", ranged=True),
    "manifest": Operation("POST", "/update_weights"),
}
INLINE_WEIGHT = 2**15  # a message that weighs less is parsed at once
ARRIVED_APART = f"{__name__}:arrived_apart"
LAST = "manifest"  # the content of the last message


class RpcMethod:
    """A method of the service, with the types of its messages."""

    def __init__(self, name: str) -> None:
        about = SERVICE.methods_by_name[name]
        self.name, self.client_streaming = name, about.client_streaming
        self.takes: type[Message] = GetMessageClass(about.input_type)
        self.gives: type[Message] = GetMessageClass(about.output_type)
        # The route of this operation is checked before a message is read.
        self.operation = OPERATIONS.get(name, UPDATES[LAST])

    async def arrive(self, data: bytes) -> Arrived:
        """Return the request in a message. `TltError` if it has too many parts, or is malformed."""
        if weigh(data, self.takes.DESCRIPTOR, enough=INLINE_WEIGHT) < INLINE_WEIGHT:
            arrived, body = self.arrived(data)
            return arrived._replace(body=b"".join(body))
        slices = [Slice(("parse", ARRIVED_APART, self.name), lambda: sliced([data]))]
        [content] = await ask(slices, total=len(data), largest=len(data))
        method, path, query, headers, body = content
        whole = await asyncio.to_thread(b"".join, body)  # it lets the loop run meanwhile
        return Arrived(method, path, query, whole, tuple(map(tuple, headers)))

    def arrived(self, data: bytes | memoryview) -> tuple[Arrived, Iterable[bytes]]:
        if not self.client_streaming:
            return self.operation.arrived(read(self.takes, data))
        message = parsed(self.takes, data)
        held = message.WhichOneof("operation")
        if held is None:
            raise InvalidRequest(
                f"the message holds none of {', '.join(UPDATES)}; send each part, then the {LAST}, "
                "which ends the stream"
            )
        return UPDATES[held].arrived(plain(getattr(message, held), held))


def arrived_apart(data: bytearray, name: str) -> tuple[Any, ...]:
    """Return the result of `arrived`, with the body in pieces: a job of the reading process."""
    method = METHODS[f"/{SERVICE.full_name}/{name}"]
    weigh(data, method.takes.DESCRIPTOR)
    arrived, body = method.arrived(memoryview(data))
    return arrived.method, arrived.path, arrived.query, arrived.headers, [*sliced(body)]


METHODS = {f"/{SERVICE.full_name}/{name}": RpcMethod(name) for name in SERVICE.methods_by_name}
