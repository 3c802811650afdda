"""UpdateWeights: parts and manifests as messages of one stream, each the HTTP operation that it
holds; TLS of the same certificates.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from tests.frontend.live_server import LiveServer, live_server
from tests.frontend.test_rpc import SHORT, refused
from tests.frontend.test_tls import Issuer, files, first, put, second
from tests.frontend.test_uploads import PART, emptied, kept
from tests.waiting import until
from tlt_client.errors import Conflict, Forbidden, InvalidRequest, NotFound, NotReached, TooLarge
from tlt_client.rpc import Manifest, Part, RolloutServiceStub, UpdateWeightsRequest, error_of
from tlt_client.rpc import rollout_pb2 as proto

__all__ = ["files", "first", "second"]  # fixtures
DATA = bytes(range(100))
TENSORS = [proto.TensorFields(name="w", checksum="sha256:0")]


@pytest.fixture
def server(model: Path, tmp_path: Path) -> Iterator[LiveServer]:
    with live_server(
        model,
        grpc_port=0,
        state_dir=tmp_path / "state",
        weight_root=tmp_path,
        weight_channels="disk,http",
        max_body_mb=1,
        max_upload_mb=1,
    ) as running:
        yield running


@pytest.fixture
def stub(server: LiveServer) -> Iterator[RolloutServiceStub]:
    with grpc.insecure_channel(server.grpc_address) as channel:
        yield RolloutServiceStub(channel)


def part(data: bytes, **fields: Any) -> UpdateWeightsRequest:
    return UpdateWeightsRequest(
        part=Part(**{"version": "v1", "part": PART, "data": data, **fields})
    )


def manifest(**fields: Any) -> UpdateWeightsRequest:
    return UpdateWeightsRequest(
        manifest=Manifest(**{"version": "v1", "channel": "http", "tensors": TENSORS, **fields})
    )


def push(stub: RolloutServiceStub, *messages: UpdateWeightsRequest) -> proto.PushReply:
    reply: proto.PushReply = stub.UpdateWeights(iter(messages), timeout=20)
    return reply


def test_grpc_push_by_manifest_alone_uses_a_different_channel(
    server: LiveServer, stub: RolloutServiceStub
) -> None:
    reply = push(
        stub,
        manifest(
            channel="disk",
            path="step-7",
            tensors=[],
            role="target",
            in_flight="drain",
            commit=False,
        ),
    )
    assert (reply.state, reply.version) == ("staged", "v1")
    [asked] = server.engine.manifests
    assert (asked.path, asked.channel, asked.in_flight) == ("step-7", "disk", "drain")
    assert asked.commit is False
    assert (
        refused(
            lambda: push(stub, manifest(channel="disk", path="weights_refused", tensors=[]))
        ).code
        == "weights_refused"
    )


def test_grpc_parts_are_stored_like_http_parts_and_pushed_once(
    server: LiveServer, stub: RolloutServiceStub
) -> None:
    reply = push(
        stub,
        part(DATA[:40], total=100),
        part(DATA[20:60], start=20, total=100),
        part(DATA[60:], start=60, total=100),
        part(DATA, part="part-2.safetensors"),
        manifest(),
    )
    assert reply.state == "committed" and reply.weight_version == "v1" and emptied(server)
    [asked] = server.engine.manifests
    assert asked.channel == "http" and len(asked.tensors) == 1


def test_broken_upload_stream_resumes_where_it_stopped(
    server: LiveServer, stub: RolloutServiceStub
) -> None:
    def breaks() -> Iterable[UpdateWeightsRequest]:
        yield part(DATA[:40], total=100)
        until(lambda: kept(server))
        raise RuntimeError("the trainer's own")

    with pytest.raises(grpc.RpcError):
        stub.UpdateWeights(breaks(), timeout=20)
    where = proto.GetPartRequest(version="v1", part=PART)
    until(lambda: stub.GetPart(where).bytes == 40)
    assert stub.GetPart(where).total == 100
    assert httpx.get(f"{server.url}/weights/v1/{PART}").json()["bytes"] == 40, (
        "one staging, whichever way it came"
    )
    assert isinstance(refused(lambda: push(stub, manifest())), Conflict)
    assert push(stub, part(DATA[40:], start=40, total=100), manifest()).state == "committed"
    assert isinstance(
        refused(lambda: stub.GetPart(proto.GetPartRequest(version="v1", part=PART))), NotFound
    )


def test_invalid_part_ends_the_stream_with_a_typed_error(
    server: LiveServer, stub: RolloutServiceStub
) -> None:
    for messages, kind, says in (
        ([part(DATA[50:], start=50, total=100)], Conflict, "send from 0"),
        (
            [part(DATA[:40], total=100), part(b"\xff" * 40, total=100)],
            Conflict,
            "was sent with other bytes",
        ),
        ([part(DATA, part="../../x")], InvalidRequest, "part is '../../x'; it must have no '/'"),
        ([part(DATA, version="a/b")], InvalidRequest, "version is 'a/b'; it must have no '/'"),
        ([part(DATA, start=-5, total=100)], InvalidRequest, "it must be bytes FIRST-LAST/TOTAL"),
        ([part(bytes(2**20 + 1))], TooLarge, "(max_body_mb)"),
        ([UpdateWeightsRequest()], InvalidRequest, "holds none of part, manifest"),
        ([], InvalidRequest, "holds none of part, manifest; send each part, then the manifest"),
        ([part(DATA[:40], total=100)], InvalidRequest, "then the manifest"),
    ):
        error = refused(lambda: push(stub, *messages))  # noqa: B023
        assert isinstance(error, kind) and says in error.message, error
    assert server.engine.manifests == []


def test_parts_of_a_key_without_the_scope_are_not_read(model: Path, tmp_path: Path) -> None:
    with (
        live_server(
            model,
            grpc_port=0,
            state_dir=tmp_path / "state",
            weight_channels="http",
            keys="data scopes=data name=data\npush scopes=push-weights name=trainer\n",
        ) as keyed,
        grpc.insecure_channel(keyed.grpc_address) as channel,
    ):
        call: Any = RolloutServiceStub(channel).UpdateWeights
        for key, expected in (("data", Forbidden), ("push", None)):
            header = ("authorization", f"Bearer {key}")
            ask = partial(call, iter([part(DATA), manifest()]), metadata=[header])
            if expected is None:
                assert ask().state == "committed"
            else:
                assert isinstance(refused(ask), expected) and kept(keyed) == []


# TLS


def credentials(trusted: Issuer, own: tuple[Path, Path] | None = None) -> grpc.ChannelCredentials:
    cert, key = own if own is not None else (None, None)
    return grpc.ssl_channel_credentials(
        trusted.ca.read_bytes(),
        key.read_bytes() if key else None,
        cert.read_bytes() if cert else None,
    )


def answers(server: LiveServer, trust: grpc.ChannelCredentials, **fields: Any) -> bool:
    with grpc.secure_channel(server.grpc_address, trust) as channel:
        try:
            return (
                len(RolloutServiceStub(channel).GenerateBatch(SHORT, timeout=30, **fields).results)
                == 1
            )
        except grpc.RpcError as error:
            assert isinstance(error_of(error), NotReached), error
            return False


def test_grpc_takes_and_renews_the_certificates_of_https(
    model: Path, files: dict[str, Path], first: Issuer, second: Issuer
) -> None:
    with live_server(model, grpc_port=0, **files) as secure:
        assert answers(secure, credentials(first)) and not answers(secure, credentials(second))
        with grpc.insecure_channel(secure.grpc_address) as plain, pytest.raises(grpc.RpcError):
            RolloutServiceStub(plain).GenerateBatch(SHORT, timeout=30)
        put(files, *second.issue("renewed"))
        until(lambda: answers(secure, credentials(second)))
        assert not answers(secure, credentials(first))


def test_a_client_certificate_is_required(
    model: Path, files: dict[str, Path], first: Issuer, second: Issuer
) -> None:
    with live_server(model, grpc_port=0, **files, tls_client_ca=first.ca) as mutual:
        assert answers(mutual, credentials(first, first.issue("client", "trainer@rl.example")))
        assert not answers(mutual, credentials(first))
        assert not answers(mutual, credentials(first, second.issue("client", "x@rl.example")))
