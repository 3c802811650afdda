"""One list of cases, each sent over HTTP and over gRPC: the same results, or the same errors with
the same words.
"""

import re
from dataclasses import dataclass
from typing import Any

import grpc
import httpx
import pytest
from google.protobuf.json_format import ParseDict
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from tests.frontend.fake_engine import HANGS
from tests.frontend.live_server import LiveServer, serving
from tests.frontend.rpc_cases import CASES, ITEM, KEYS, Case, batch
from tests.waiting import until
from tlt_client.errors import ServerError
from tlt_client.rpc import RolloutServiceStub, error_of
from tlt_server import errors
from tlt_server.frontend.rpc.methods import OPERATIONS, SERVICE

keyed = serving(
    keys=KEYS,
    grpc_port=0,
    max_body_mb=1,
    max_batch_items=8,
    max_n=4,
    max_queue=24,
    max_batch_output_tokens=2000,
)


@dataclass
class Answer:
    """The part of either reply in which the two transports must agree."""

    reply: Any = None  # an object, or a list of events
    code: str = ""
    message: str = ""
    retryable: bool | None = None
    retry_after: str | None = None
    request_id: str = ""


def over_http(server: LiveServer, method: str, case: Case) -> Answer:
    """Translate a method to its operation as `clients/proto/rollout.proto` says, without the
    server's own translation.
    """
    operation = OPERATIONS[method]
    says = {**case.says, **operation.fixed}
    path = re.sub(
        r"{(\w+)}",
        lambda found: httpx.URL("/" + str(says.pop(found[1], ""))).path[1:],
        operation.path,
    )
    headers = {**case.metadata, **({"authorization": f"Bearer key-{case.key}"} if case.key else {})}
    query = (
        {
            name: str(value).lower() if isinstance(value, bool) else value
            for name, value in says.items()
        }
        if operation.in_query
        else {}
    )
    body = None if operation.in_query else httpx.Request("POST", "http://x", json=says).content
    reply = httpx.request(
        operation.method,
        server.url + path,
        params=query,
        headers=headers,
        timeout=20,
        # A generator, so that the size of the body is not declared.
        content=(part for part in [body]) if body is not None else None,
    )
    found = Answer(
        request_id=reply.headers["x-request-id"], retry_after=reply.headers.get("retry-after")
    )
    if reply.headers["content-type"].startswith("text/event-stream"):
        events = re.findall(r"event: (\w+)\ndata: (.*)\n", reply.text)
        found.reply = [{name: httpx.Response(200, text=data).json()} for name, data in events]
        return found
    content = reply.json()
    if reply.status_code >= 400 and "error" in content:
        error = content["error"]
        found.code, found.message = error["code"], error["message"]
        found.retryable = error["retryable"]
        assert by_code(found.code).http_status == reply.status_code
    else:
        found.reply = content
    return found


def over_grpc(server: LiveServer, method: str, case: Case) -> Answer:
    about = SERVICE.methods_by_name[method]
    says = {f"{name}_null" if value is None else name: value for name, value in case.says.items()}
    if any(value is None for value in case.says.get("sampling", {}).values()):
        says["sampling"] = {
            f"{name}_null" if value is None else name: value
            for name, value in case.says["sampling"].items()
        }
    if any(isinstance(item.get("sd"), dict) for item in says.get("requests", ())):
        says["requests"] = [
            {"sd_object" if name == "sd" else name: value for name, value in item.items()}
            for item in says["requests"]
        ]
    message = ParseDict(says, GetMessageClass(about.input_type)())
    metadata = [
        *case.metadata.items(),
        *([("authorization", f"Bearer key-{case.key}")] if case.key else []),
    ]
    with grpc.insecure_channel(server.grpc_address) as channel:
        call: Any = getattr(RolloutServiceStub(channel), method)
        try:
            if about.server_streaming:
                stream = call(message, metadata=metadata, timeout=20)
                reply: Any = [
                    {event.WhichOneof("event"): as_json(getattr(event, event.WhichOneof("event")))}
                    for event in stream
                ]
                initial = stream.initial_metadata()
            else:
                whole, ended = call.with_call(message, metadata=metadata, timeout=20)
                reply, initial = as_json(whole), ended.initial_metadata()
        except grpc.RpcError as failed:
            error, trailing = error_of(failed), dict(failed.trailing_metadata())
            assert isinstance(error, ServerError) and failed.details() == error.message, failed
            assert failed.code().name == by_code(error.code).grpc_code
            assert (error.retry_after_s is None) == ("retry-after" not in trailing)
            return Answer(
                None,
                error.code,
                error.message,
                error.retryable,
                trailing.get("retry-after"),
                trailing["x-request-id"],
            )
    metadata = dict(initial)
    return Answer(
        reply, retry_after=metadata.get("retry-after"), request_id=metadata["x-request-id"]
    )


def by_code(code: str) -> type[errors.TltError]:
    return type(errors.from_code(code, ""))


def as_json(message: Message) -> dict[str, Any]:
    """A reply as HTTP phrases it, without what is empty."""
    found: dict[str, Any] = {}
    for about, value in message.ListFields():
        union = about.containing_oneof
        name = union.name if union is not None and not union.name.startswith("_") else about.name
        if about.message_type is None:
            found[name] = list(value) if about.is_repeated else value
        elif about.message_type.full_name == "google.protobuf.Struct":
            found[name] = dict(value)
        elif about.message_type.GetOptions().map_entry:
            found[name] = dict(value)
        elif about.is_repeated:
            found[name] = [
                [list(part.token_ids), list(part.logprobs)]
                if part.DESCRIPTOR.name == "Alternatives"
                else as_json(part)
                for part in value
            ]
        else:
            found[name] = as_json(value)
    return thin(found)


def thin(content: Any) -> Any:
    """Drop what is null, empty, 0 or false, which in a message is an absent field."""
    if isinstance(content, dict):
        thinned = {name: thin(value) for name, value in content.items()}
        return {
            name: value for name, value in thinned.items() if value not in (None, "", 0, [], {})
        }
    if isinstance(content, list):
        return [thin(part) if part is not None else [[], []] for part in content]
    return content


@pytest.mark.parametrize(
    ("method", "case"),
    [
        pytest.param(method, case, id=f"{method}-{case.about}"[:80])
        for case in CASES
        for method in case.methods
    ],
)
def test_http_and_grpc_give_the_same_results(method: str, case: Case, keyed: LiveServer) -> None:
    if method == "CommitWeights" and not case.error:
        over_http(keyed, method, case)  # so that both repeat it
    http, rpc = over_http(keyed, method, case), over_grpc(keyed, method, case)
    assert rpc.code == case.error, (http, rpc)
    assert rpc.message == http.message and (rpc.code or rpc.reply is not None)
    assert (http.code, http.retryable) == (rpc.code, rpc.retryable)
    assert (http.retry_after is None) == (rpc.retry_after is None)
    assert (http.request_id == rpc.request_id) == ("x-request-id" in case.metadata)
    if case.error:
        return
    ignored = ("config", "phases_s", "pause_ms")  # their numbers are other types, or measured
    assert compared(rpc.reply, ignored) == compared(http.reply, ignored)


def compared(reply: Any, ignored: tuple[str, ...]) -> Any:
    """Collect what each choice of a stream gained in all: its cut into events depends on the
    clock.
    """
    if not isinstance(reply, list):
        return thin({name: value for name, value in reply.items() if name not in ignored})
    gained: dict[tuple[str, int], dict[str, Any]] = {}
    for event in (thin(event) for event in reply):
        if "token" in event:
            token = event["token"]
            so_far = gained.setdefault((token["id"], token.get("index", 0)), {})
            for name in ("token_ids", "text", "logprobs", "top_logprobs", "prompt_logprobs"):
                if name in token:
                    so_far[name] = so_far[name] + token[name] if name in so_far else token[name]
    ends = sorted(
        (event for event in (thin(event) for event in reply) if "token" not in event), key=str
    )
    return gained, ends


def key_case(says: dict[str, Any], key: str, **fields: Any) -> Case:
    return Case("", says, key=key, metadata={"idempotency-key": "step-7"}, **fields)


def test_idempotency_key_is_shared_by_http_and_grpc(keyed: LiveServer) -> None:
    """Each of two tenants uses one name over one transport: repeated it is one run, with another
    body a conflict.
    """
    answers = []
    for ask, key in ((over_http, "data"), (over_grpc, "other")):
        first = ask(keyed, "GenerateBatch", key_case(batch(ITEM), key))
        again = ask(keyed, "GenerateBatch", key_case(batch(ITEM), key))
        other = ask(keyed, "GenerateBatch", key_case(batch({"prompt": "b"}), key))
        assert thin(first.reply) == thin(again.reply) and other.code == "conflict"
        answers.append((compared(first.reply, ()), other.code, other.message, other.retryable))
    assert answers[0] == answers[1]
    assert len([rollout for rollout in keyed.rollouts if rollout.header.key == "step-7"]) == 2


def test_rollout_belongs_to_its_owner_over_http_and_grpc(keyed: LiveServer) -> None:
    rollout = over_grpc(
        keyed, "Detach", Case("", batch(ITEM, sampling={"max_tokens": 4}), key="data")
    ).reply["id"]
    for method in ("GetRollout", "DeleteRollout"):
        http, rpc = (
            ask(keyed, method, Case("", {"id": rollout}, key="other"))
            for ask in (over_http, over_grpc)
        )
        assert http.code == rpc.code == "not_found" and http.message == rpc.message
    own = Case("", {"id": rollout, "wait_s": 10.0}, key="data")
    http, rpc = over_http(keyed, "GetRollout", own), over_grpc(keyed, "GetRollout", own)
    assert thin(http.reply) == rpc.reply and rpc.reply["status"] == "done"
    assert rpc.reply["results"][0]["choices"]
    http, rpc = (
        ask(keyed, "ListRollouts", Case("", {}, key="data")) for ask in (over_http, over_grpc)
    )
    assert thin(http.reply) == rpc.reply and rollout in str(rpc.reply)
    assert (
        over_grpc(keyed, "DeleteRollout", Case("", {"id": rollout}, key="data")).reply["status"]
        == "deleted"
    )
    assert (
        over_http(keyed, "GetRollout", own).code
        == over_grpc(keyed, "GetRollout", own).code
        == "not_found"
    )


def test_http_and_grpc_describe_a_pause_alike(keyed: LiveServer) -> None:
    pause = Case("", {"in_flight": "abort", "new_requests": "refuse", "clear_cache": True})
    assert over_grpc(keyed, "Pause", pause).reply == {"paused": True, "new_requests": "refuse"}
    try:
        http, rpc = (
            ask(keyed, "GenerateBatch", Case("", batch(ITEM))) for ask in (over_http, over_grpc)
        )
        assert rpc.code == "unavailable" and rpc.retry_after == "1" and rpc.retryable
    finally:
        assert over_grpc(keyed, "Resume", Case("")).reply == {"new_requests": "run"}
    assert (http.code, http.message, http.retry_after) == (rpc.code, rpc.message, rpc.retry_after)


def test_an_abort_by_name_counts_its_sequences(keyed: LiveServer) -> None:
    hangs = batch({"token_ids": [HANGS], "n": 4, "id": "h"})
    assert over_grpc(keyed, "Detach", Case("", hangs, key="data")).reply
    until(lambda: len(keyed.client) == 4)
    aborted = over_grpc(keyed, "Abort", Case("", {"ids": ["h"]}, key="data"))
    assert aborted.reply == {"sequences": 4}
    until(lambda: len(keyed.client) == 0)
