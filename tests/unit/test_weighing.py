"""The weight of gRPC messages, found before they are parsed."""

import pytest

from tlt_client.rpc import rollout_pb2
from tlt_client.rpc.rollout_pb2 import GenerateRequest, Item, Message, UpdateWeightsRequest
from tlt_server.errors import InvalidRequest, TooLarge
from tlt_server.frontend.rpc import messages
from tlt_server.frontend.rpc.messages import PART_WEIGHT, weigh
from tlt_server.frontend.rpc.methods import METHODS

ABOUT = GenerateRequest.DESCRIPTOR


def test_message_weight_equals_the_objects_made_from_the_message() -> None:
    few = GenerateRequest(requests=[Item(prompt="a" * 100)]).SerializeToString()
    assert 100 < weigh(few, ABOUT) < 100 + 4 * PART_WEIGHT
    ids = GenerateRequest(requests=[Item(token_ids=[*range(5000)])]).SerializeToString()
    assert weigh(ids, ABOUT) > 5000
    assert weigh(ids * 50, ABOUT, enough=1000) < 10_000  # it need not be read to its end
    part = UpdateWeightsRequest(part={"version": "v", "part": "p", "data": b"x" * 10**6})
    assert weigh(part.SerializeToString(), UpdateWeightsRequest.DESCRIPTOR) < 10 * PART_WEIGHT


def test_too_many_parts_are_refused_at_every_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "MAX_MEMBERS", 100)
    monkeypatch.setattr(messages, "MAX_PARTS", 250)
    taken = [Item(messages=[Message()] * 49)] * 4
    weigh(GenerateRequest(requests=taken).SerializeToString(), ABOUT)
    for items, says in (
        ([Item()] * 101, "^requests has more than 100 members; that is the limit: send several"),
        ([Item(messages=[Message()] * 101)], "^messages has more than 100 members"),
        ([Item(messages=[Message()] * 60)] * 5, "^the message has more than 250 fields in all"),
    ):
        with pytest.raises(TooLarge, match=says):
            weigh(GenerateRequest(requests=items).SerializeToString(), ABOUT)
    with pytest.raises(TooLarge, match="^the field number 99 has more than 100 members"):
        weigh(b"\x9a\x06\x00" * 101, ABOUT)


@pytest.mark.parametrize(
    "data", [b"\x0a", b"\x0a\x05a", b"\x0b", b"\xff" * 11, b"\x0a\x02\x12\x09", b"\x09abc"]
)
def test_malformed_message_is_refused_like_the_parser_does(data: bytes) -> None:
    with pytest.raises(InvalidRequest, match="is no tlt.v1"):
        weigh(data, ABOUT)


def test_every_grpc_message_can_be_weighed() -> None:
    assert len(METHODS) > 20 and rollout_pb2.DESCRIPTOR is not None
    for method in METHODS.values():
        assert weigh(method.takes().SerializeToString(), method.takes.DESCRIPTOR) == 0
