"""Failed calls as errors of the tree in `tlt_client.errors`."""

from __future__ import annotations

from typing import Any

import grpc
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status

from tlt_client.errors import (
    ConnectionFailed,
    NotReached,
    ServerError,
    TltClientError,
    server_error,
)
from tlt_client.rpc.rollout_pb2 import Error

HTTP_STATUS = {
    "INVALID_ARGUMENT": 400,
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "NOT_FOUND": 404,
    "ABORTED": 409,
    "FAILED_PRECONDITION": 422,
    "RESOURCE_EXHAUSTED": 429,
    "CANCELLED": 499,
    "INTERNAL": 500,
    "UNIMPLEMENTED": 501,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}


def error_of(failed: grpc.RpcError) -> TltClientError:
    """Return the error of a failed call; its `status` is the HTTP status nearest to gRPC's.
    Failures of the transport or the network have none: a lost connection is `ConnectionFailed`, any
    other one a `ServerError` of the code `unknown`.
    """
    call: Any = failed  # a call and an error in one
    name, metadata = call.code().name, dict(call.trailing_metadata() or ())
    if "grpc-status-details-bin" not in metadata:
        if name == "UNAVAILABLE":
            return (
                NotReached(call.details())
                if "connect" in call.details()
                else ConnectionFailed(call.details())
            )
        return ServerError(
            "unknown", f"{name}: {call.details()}", status=HTTP_STATUS.get(name, 500)
        )
    found, retry = Error(), RetryInfo()
    waits = False
    for detail in Status.FromString(metadata["grpc-status-details-bin"]).details:
        detail.Unpack(found)
        waits |= detail.Unpack(retry)
    return server_error(
        found.code,
        found.message,
        status=HTTP_STATUS.get(name, 500),
        retryable=found.retryable,
        retry_after_s=float(retry.retry_delay.seconds) if waits else None,
    )
