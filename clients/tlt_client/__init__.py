"""Client of TLT Server: `Client` and `AsyncClient` over HTTP, the wire models, the tree of errors
(`tlt_client.errors`). Importing it imports no torch.

from tlt_client import Client

with Client("http://127.0.0.1:8000") as client:
    reply = client.generate([{"prompt": "2 + 2 =", "n": 4, "seed": 7}], sampling={"max_tokens": 32})
    for choice in reply.results[0].choices:
        print(choice.text, sum(choice.logprobs))
"""

from __future__ import annotations

from tlt_client.async_client import AsyncClient
from tlt_client.client import Client
from tlt_client.errors import ConnectionFailed, ServerError, TltClientError
from tlt_client.retries import Retries
from tlt_client.rollouts import AsyncRollout, Rollout
from tlt_client.tls import Tls
from tlt_client.wire import (
    Choice,
    Done,
    Item,
    ItemResult,
    Progress,
    Reply,
    RolloutReply,
    RolloutSummary,
    SamplingFields,
    SdLimits,
    SdReport,
    StreamEvent,
    StructuredOutputs,
    Token,
    Usage,
    VersionSpan,
    WireError,
)

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
