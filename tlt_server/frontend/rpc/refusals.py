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


async def refuse(context: Context, error: TltError, metadata: list[tuple[str, str]]) -> None:
    """End the call with this error."""
    code = grpc.StatusCode[error.grpc_code]
    details = [_packed(Error(code=error.code, message=error.message, retryable=error.retryable))]
    retry_after = dict(metadata).get(RETRY_AFTER)
    if retry_after is not None:
        retry = RetryInfo()
        retry.retry_delay.seconds = int(retry_after)
        details.append(_packed(retry))
    status = Status(code=code.value[0], message=error.message, details=details)
    await context.abort(code, error.message, (*metadata, (DETAILS, status.SerializeToString())))


def _packed(message: Error | RetryInfo) -> Any:
    packed = Any()
    packed.Pack(message)
    return packed
