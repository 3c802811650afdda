"""Client of TLT Server: `Client` and `AsyncClient` over HTTP, the wire models, and the tree of
errors (`tlt_client.errors`). Importing it imports no torch; httpx is imported with the first
client.

from tlt_client import Client

with Client("http://127.0.0.1:8000") as client:
    reply = client.generate([{"prompt": "2 + 2 =", "n": 4, "seed": 7}], sampling={"max_tokens": 32})
    for choice in reply.results[0].choices:
        print(choice.text, sum(choice.logprobs))
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from tlt_client.errors import ConnectionFailed, ServerError, TltClientError
from tlt_client.fields import Item, SamplingFields, SdLimits, StructuredOutputs
from tlt_client.retries import Retries
from tlt_client.tls import Tls
from tlt_client.wire import (
    Choice,
    Done,
    ItemResult,
    Progress,
    Reply,
    RolloutReply,
    RolloutSummary,
    SdReport,
    StreamEvent,
    Token,
    Usage,
    VersionSpan,
    WireError,
)

if TYPE_CHECKING:
    from tlt_client.async_client import AsyncClient, AsyncRollout
    from tlt_client.client import Client, Rollout
else:
    # A trainer's process, and each of the server's, imports channels or errors from here; httpx
    # would take 0.2 s of it.
    _LATER = {
        "AsyncClient": "async_client",
        "AsyncRollout": "async_client",
        "Client": "client",
        "Rollout": "client",
    }

    def __getattr__(name: str) -> object:
        if name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)


__version__ = "0.1.0"
__all__ = [
    "AsyncClient",
    "AsyncRollout",
    "Choice",
    "Client",
    "ConnectionFailed",
    "Done",
    "Item",
    "ItemResult",
    "Progress",
    "Reply",
    "Retries",
    "Rollout",
    "RolloutReply",
    "RolloutSummary",
    "SamplingFields",
    "SdLimits",
    "SdReport",
    "ServerError",
    "StreamEvent",
    "StructuredOutputs",
    "Tls",
    "TltClientError",
    "Token",
    "Usage",
    "VersionSpan",
    "WireError",
]
