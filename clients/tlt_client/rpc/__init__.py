"""gRPC: what is generated of `clients/proto/rollout.proto`, and errors of the tree in
`tlt_client.errors`. Needs the extra `grpc`.

import grpc
from tlt_client.rpc import GenerateRequest, Item, RolloutServiceStub, error_of

with grpc.insecure_channel("127.0.0.1:8001") as channel:
    reply = RolloutServiceStub(channel).GenerateBatch(GenerateRequest(requests=[Item(prompt="2+2=",
    n=4, seed=7)]))
"""

from tlt_client.rpc.errors import error_of
from tlt_client.rpc.rollout_pb2 import (
    GenerateRequest,
    GetInfoRequest,
    Item,
    Manifest,
    Message,
    Part,
    SamplingFields,
    UpdateWeightsRequest,
    WatchEventsRequest,
)
from tlt_client.rpc.rollout_pb2_grpc import RolloutServiceStub

__all__ = [
    "GenerateRequest",
    "GetInfoRequest",
    "Item",
    "Manifest",
    "Message",
    "Part",
    "RolloutServiceStub",
    "SamplingFields",
    "UpdateWeightsRequest",
    "WatchEventsRequest",
    "error_of",
]
