"""Errors in gRPC's form: a status, and in the trailing metadata the typed error, when to try again,
and the id of the request.
"""

from __future__ import annotations

import grpc
from google.protobuf.any_pb2 import Any
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status

from tlt_client.rpc.rollout_pb2 import Error
from tlt_server.errors import TltError
from tlt_server.frontend.rpc.exchange import Context

DETAILS = "grpc-status-details-bin"
RETRY_AFTER = "retry-after"
GAP = " ... "
MAX_MESSAGE_BYTES = 1024  # it is sent three times, and a client takes 8 kB of metadata


async def refuse(context: Context, error: TltError, metadata: list[tuple[str, str]]) -> None:
    """End the call with this error."""
    code, message = grpc.StatusCode[error.grpc_code], _cut(error.message)
    details = [_packed(Error(code=error.code, message=message, retryable=error.retryable))]
    retry_after = dict(metadata).get(RETRY_AFTER)
    if retry_after is not None:
        retry = RetryInfo()
        retry.retry_delay.seconds = int(retry_after)
        details.append(_packed(retry))
    status = Status(code=code.value[0], message=message, details=details)
    await context.abort(code, message, (*metadata, (DETAILS, status.SerializeToString())))


def _cut(message: str) -> str:
    """Cut the middle out of a message that is too long. Its end has the remedy."""
    data = message.encode(errors="replace")
    if len(data) <= MAX_MESSAGE_BYTES:
        return data.decode()
    half = (MAX_MESSAGE_BYTES - len(GAP)) // 2
    return data[:half].decode(errors="ignore") + GAP + data[-half:].decode(errors="ignore")


def _packed(message: Error | RetryInfo) -> Any:
    packed = Any()
    packed.Pack(message)
    return packed
