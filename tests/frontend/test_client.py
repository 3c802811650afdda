"""The two clients: the same operations with the same results, the server's errors by class, and
retries that never run a request twice.
"""

import asyncio
import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import httpx
import msgspec
import pytest

import tlt_client.errors as client_errors
from tests.frontend.fake_engine import FAILS
from tests.frontend.flaky import flaky
from tests.frontend.live_server import LiveServer
from tlt_client import (
    AsyncClient,
    Client,
    ConnectionFailed,
    Done,
    Retries,
    ServerError,
    TltClientError,
    calls,
    flows,
)
from tlt_client.errors import (
    Conflict,
    EngineFailed,
    Forbidden,
    Internal,
    InvalidRequest,
    NotFound,
    NotReached,
    QueueFull,
    TooLarge,
    Unauthenticated,
    Unavailable,
    WeightsRefused,
    server_error,
)
from tlt_client.fields import Item, SamplingFields
from tlt_client.responses import succeeded
from tlt_client.retries import NEVER
from tlt_client.wire import ItemResult
from tlt_server import errors as server_errors
from tlt_server.frontend.dialects.replies.errors import fault

QUICK = Retries(times=3, first_s=0.01, max_s=0.05)
BATCH = [{"id": "a", "prompt": "abc", "seed": 7}]
SHORT = {"max_tokens": 3}


# errors


def test_every_server_error_has_a_client_class_of_its_name() -> None:
    def tree(cls: type[Any]) -> list[type[Any]]:
        return [cls, *(leaf for sub in cls.__subclasses__() for leaf in tree(sub))]

    seen: dict[str, str] = {}  # a subclass may have its parent's code: it is the same to clients
    for cls in tree(server_errors.TltError):
        if cls.code != server_errors.StartupError.code:
            seen.setdefault(cls.code, cls.__name__)
    assert seen.pop("internal") == "TltError"
    assert {
        cls.of_code: cls.__name__ for cls in tree(ServerError) if cls not in (ServerError, Internal)
    } == seen
    for code, name in seen.items():
        error = server_error(code, "why", status=418, retryable=True, retry_after_s=2.0)
        assert type(error) is getattr(client_errors, name)
        assert (error.code, error.message, error.status) == (code, "why", 418)
        assert (error.retryable, error.retry_after_s) == (True, 2.0)
    assert type(server_error("of tomorrow", "why", status=400)) is ServerError


@pytest.mark.parametrize(
    "error",
    [
        server_errors.InvalidRequest,
        server_errors.Unauthenticated,
        server_errors.Forbidden,
        server_errors.NotFound,
        server_errors.RequestTimeout,
        server_errors.Conflict,
        server_errors.TooLarge,
        server_errors.Unavailable,
        server_errors.DeadlineExceeded,
        server_errors.MethodNotAllowed,
        server_errors.ChannelBroken,
        server_errors.StorageFailed,
    ],
)
def test_vllm_envelope_error_has_its_status_class(error: type[server_errors.TltError]) -> None:
    body = msgspec.json.encode(fault(error("why")))
    with pytest.raises(getattr(client_errors, error.__name__), match=r": why\Z") as caught:
        succeeded(httpx.Response(error.http_status, content=body))
    assert (caught.value.code, caught.value.retryable) == (error.code, error.retryable)
    with pytest.raises(ServerError, match=r"unknown: why\Z") as caught:
        succeeded(httpx.Response(418, content=body))
    assert type(caught.value) is ServerError


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda client: client.generate([{"prompt": "a", "tempo": 1}]), InvalidRequest),
        (lambda client: client.rollout("r-none").fetch(), NotFound),
        (lambda client: client.update_weights("weights_refused", "v"), WeightsRefused),
        (lambda client: client.update_weights("conflict", "v"), Conflict),
        (lambda client: client.update_weights("forbidden", "v"), Forbidden),
        (lambda client: client.set_strategy("beg"), InvalidRequest),
        (lambda client: client.drafter_samples(), Conflict),
        (lambda client: client.drafter_samples(-1), InvalidRequest),
        (lambda client: client.add_drafter_samples(b""), Conflict),
        (lambda client: client.drafter_files(), Conflict),
        (lambda client: client.drafter_file("v", "no"), Conflict),
        (lambda client: client.pause("stop"), InvalidRequest),
        (lambda client: client.abort(), InvalidRequest),
        (lambda client: client.sleep("kv"), InvalidRequest),
        (lambda client: client.compare_weights(), InvalidRequest),
    ],
)
def test_a_refusal_raises_the_class_of_its_code(
    server: LiveServer, call: Callable[[Any], Any], error: type[ServerError]
) -> None:
    async def asked() -> Any:
        async with AsyncClient(server.url) as client:
            return await call(client)

    with Client(server.url) as client:
        for ask in (lambda: call(client), lambda: asyncio.run(asked())):  # noqa: B023
            with pytest.raises(error) as caught:
                ask()
            assert type(caught.value) is error and caught.value.message


# one set of operations


def public(cls: type[Any]) -> dict[str, list[tuple[str, Any, Any]]]:
    return {
        name: [(p.name, p.kind, p.default) for p in inspect.signature(member).parameters.values()]
        for name, member in inspect.getmembers(cls, inspect.isfunction)
        if not name.startswith("_")
    }


def test_both_clients_have_the_same_operations() -> None:
    assert public(Client) == public(AsyncClient) and len(public(Client)) >= 18
    assert public(type(Client().rollout("x"))) == public(type(AsyncClient().rollout("x")))
    parameters = [
        list(inspect.signature(cls.__init__).parameters.values())[1:]
        for cls in (Client, AsyncClient)
    ]
    assert [(p.name, p.default) for p in parameters[0]] == [
        (p.name, p.default) for p in parameters[1]
    ]


OPERATIONS: list[Callable[[Any], Any]] = [
    lambda client: client.generate(BATCH, sampling=SHORT, timeout_s=20.0, queue_timeout_s=20.0),
    lambda client: client.generate([{"id": "b", "token_ids": [FAILS]}, *BATCH], sampling=SHORT),
    lambda client: client.generate([{"id": "b", "token_ids": [FAILS]}], sampling=SHORT),
    lambda client: client.generate(BATCH, sampling=SHORT, idempotency_key="the-same"),
    lambda client: client.strategy(),
    lambda client: client.drafter(),
    lambda client: client.set_strategy("off"),
    lambda client: client.pause("drain", new_requests="refuse", clear_cache=True),
    lambda client: client.resume(),
    lambda client: client.abort("unknown", "other"),
    lambda client: client.abort(all=True),
    lambda client: client.sleep(in_flight="abort"),
    lambda client: client.wake("kv_cache", "weights"),
    lambda client: client.clear_cache(unless_held=True),
    lambda client: client.update_weights("p", "v1", commit=False),
    lambda client: client.commit_weights("v1"),
    lambda client: client.abort_weights("v1"),
    lambda client: client.roll_back_weights(to="v0"),
    lambda client: client.weights(),
    lambda client: client.weight_checksums(),
    lambda client: client.remember_weight_checksums(),
    lambda client: client.compare_weights(),
    lambda client: client.compare_weights({"w": "sha256:other"}),
    lambda client: client.is_ready(),
    lambda client: client.rollouts(),
]


@pytest.mark.parametrize(
    "operation", OPERATIONS, ids=lambda operation: operation.__code__.co_names[0]
)
def test_both_clients_give_the_same_results(
    server: LiveServer, operation: Callable[[Any], Any]
) -> None:
    async def asked() -> Any:
        async with AsyncClient(server.url, timeout_s=20) as client:
            await client.update_weights("p", "v0")
            return await operation(client)

    with Client(server.url, timeout_s=20) as client:
        client.update_weights("p", "v0")  # so that both begin at the same versions
        assert operation(client) == asyncio.run(asked()) is not None


@pytest.mark.parametrize(
    ("items", "how", "said"),
    [
        (
            BATCH,
            {"sampling": {"temperature": math.nan}},
            "sampling.temperature is nan; it must be a finite number",
        ),
        (BATCH, {"sampling": SamplingFields(top_p=math.inf)}, "sampling.top_p is inf;"),
        (BATCH, {"timeout_s": math.nan}, "timeout_s is nan;"),
        (
            [*BATCH, {"prompt": "a", "sampling": {"logit_bias": {"5": -math.inf}}}],
            {},
            r"requests\[1\].sampling.logit_bias.5 is -inf;",
        ),
        (
            [Item(prompt="a", sampling=SamplingFields(min_p=math.nan))],
            {},
            r"requests\[0\].sampling.min_p is nan;",
        ),
    ],
)
def test_numbers_without_a_json_form_are_refused_unsent(
    items: list[Any], how: dict[str, Any], said: str
) -> None:
    url = "http://127.0.0.1:9"  # nothing listens there
    client, other = Client(url), AsyncClient(url)
    for call in (client.generate, client.stream):
        with pytest.raises(ValueError, match=f"^{said}"):
            list(call(items, **how))
    with pytest.raises(ValueError, match=f"^{said}"):
        asyncio.run(other.generate(items, **how))


def test_both_clients_stream_detach_and_fetch_alike(server: LiveServer) -> None:
    async def asked() -> Any:
        async with AsyncClient(server.url, timeout_s=20) as client:
            events = [event async for event in client.stream(BATCH, sampling=SHORT)]
            rollout = await client.generate(BATCH, sampling=SHORT, detach=True)
            reply = await rollout.result(30)
            fetched = await client.rollout(rollout.id).fetch(wait_s=1)
            await rollout.delete()
            with pytest.raises(NotFound):
                await rollout.fetch()
            return (
                events,
                reply,
                fetched.results,
                "tlt_ready" in await client.metrics(),
                (await client.server_info())["version"],
            )

    with Client(server.url, timeout_s=20) as client:
        events = list(client.stream(BATCH, sampling=SHORT))
        rollout = client.generate(BATCH, sampling=SHORT, detach=True)
        reply = rollout.result(30)
        fetched = client.rollout(rollout.id).fetch(wait_s=1)
        rollout.delete()
        with pytest.raises(NotFound):
            rollout.fetch()
        assert asyncio.run(asked()) == (
            events,
            reply,
            fetched.results,
            "tlt_ready" in client.metrics(),
            client.server_info()["version"],
        )
    assert isinstance(events[-1], Done) and any(isinstance(event, ItemResult) for event in events)
    assert fetched.results == reply.results


# retries, by the rules


def pauses(
    retries: Retries, *errors: TltClientError, repeatable: bool = False
) -> tuple[list[float], Any]:
    """Return the pauses and the result of a call that fails with these errors, then succeeds."""
    flow = flows.tried(
        calls.Call("GET", "/x", lambda response: None, repeatable=repeatable), retries
    )
    step, left, paused = next(flow), list(errors), list[float]()
    try:
        while True:
            if isinstance(step, flows.Wait):
                paused.append(step.seconds)
                step = flow.send(None)
            else:
                step = flow.throw(left.pop(0)) if left else flow.send("done")
    except StopIteration as end:
        return paused, end.value
    except TltClientError as error:
        return paused, error


def refusal(
    status: int, *, retryable: bool = True, retry_after_s: float | None = None
) -> ServerError:
    return server_error(
        "unavailable", "", status=status, retryable=retryable, retry_after_s=retry_after_s
    )


@pytest.mark.parametrize(
    ("error", "once", "repeatable"),
    [
        (refusal(503), True, True),
        (refusal(429), True, True),
        (refusal(408), True, True),
        (NotReached(), True, True),
        (ConnectionFailed(), False, True),
        (refusal(500), False, True),
        (refusal(507), False, True),
        (refusal(503, retryable=False), False, False),
        (refusal(400, retryable=False), False, False),
        (refusal(429, retry_after_s=2.0), True, True),
        (refusal(429, retry_after_s=31.0), False, False),
    ],
)
def test_calls_are_repeated_only_when_safe(
    error: TltClientError, once: bool, repeatable: bool
) -> None:
    for may_repeat, again in ((False, once), (True, repeatable)):
        paused, end = pauses(Retries(), error, repeatable=may_repeat)
        assert (end == "done", len(paused)) == (again, int(again)), "otherwise the error itself"
        assert again or end is error
    assert pauses(NEVER, error, repeatable=True) == ([], error)


def test_retry_delays_double_up_to_a_bound() -> None:
    errors = [refusal(503) for _ in range(9)]
    paused, end = pauses(Retries(times=8, first_s=1.0, max_s=10.0), *errors)
    assert end is errors[8], "the last one"
    for pause_s, whole_s in zip(paused, (1, 2, 4, 8, 10, 10, 10, 10), strict=True):
        assert whole_s / 2 <= pause_s <= whole_s
    assert len(set(paused)) == len(paused), "drawn, so that clients do not come back together"
    assert pauses(Retries(first_s=0.1), refusal(429, retry_after_s=7.0))[0] == [7.0], (
        "the server knows better"
    )


@pytest.mark.parametrize(
    "fields", [{"times": -1}, {"first_s": -1.0}, {"first_s": 2.0, "max_s": 1.0}]
)
def test_contradicting_retries_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="none may be negative"):
        Retries(**fields)


# retries, against a network that fails


def ask(url: str, asynchronous: bool, call: Callable[[Any], Any], retries: Retries = QUICK) -> Any:
    async def asked() -> Any:
        async with AsyncClient(url, timeout_s=20, retries=retries) as client:
            return await call(client)

    if asynchronous:
        return asyncio.run(asked())
    with Client(url, timeout_s=20, retries=retries) as client:
        return call(client)


def generate(client: Any, **fields: Any) -> Any:
    return client.generate(BATCH, sampling=SHORT, **fields)


both = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


@both
@pytest.mark.parametrize("detach", [False, True])
def test_batch_runs_once_despite_drops_refusals_and_lost_replies(
    server: LiveServer, asynchronous: bool, detach: bool
) -> None:
    before = len(server.engine.submitted)
    with flaky(server.url, "drop", "refuse", "lose") as proxy:
        call = partial(generate, detach=detach)
        reply = ask(proxy.url, asynchronous, call)
        assert proxy.connections == 4
    assert detach or reply.results[0].choices[0].text == "abc"
    assert len(server.engine.submitted) == before + 1


@both
def test_a_commit_without_a_reply_is_sent_again(server: LiveServer, asynchronous: bool) -> None:
    version = f"lost-{asynchronous}"
    with flaky(server.url, "lose") as proxy:
        reply = ask(proxy.url, asynchronous, lambda client: client.commit_weights(version))
    assert (reply["state"], reply["version"]) == ("unchanged", version)
    assert reply["weight_version"] == version


@both
def test_without_retries_the_first_failure_is_raised(
    server: LiveServer, asynchronous: bool
) -> None:
    with flaky(server.url, "lose", "refuse") as proxy:
        with pytest.raises(ConnectionFailed):
            ask(proxy.url, asynchronous, generate, NEVER)
        with pytest.raises(Unavailable):
            ask(proxy.url, asynchronous, generate, NEVER)
        assert proxy.connections == 2


@both
def test_retries_are_bounded_and_the_last_error_is_raised(
    server: LiveServer, asynchronous: bool
) -> None:
    with flaky(server.url, *["refuse"] * 9) as proxy:
        with pytest.raises(Unavailable, match="not now"):
            ask(proxy.url, asynchronous, lambda client: client.weights())
        assert proxy.connections == 1 + QUICK.times
    with flaky(server.url, "refuse", retry_after_s=60) as proxy:
        with pytest.raises(Unavailable) as caught:
            ask(proxy.url, asynchronous, lambda client: client.weights())
        assert (proxy.connections, caught.value.retry_after_s) == (1, 60.0), (
            "longer than it is to wait"
        )


@both
def test_ambiguous_calls_are_repeated_only_if_idempotent(
    server: LiveServer, asynchronous: bool
) -> None:
    before = len(server.engine.weight_commands)
    with flaky(server.url, "lose") as proxy:
        assert (
            ask(proxy.url, asynchronous, lambda client: client.update_weights("p", "v2"))["version"]
            == "v2"
        )
    assert len(server.engine.weight_commands) == before + 2, (
        "a push is idempotent by version and content"
    )
    with flaky(server.url, "lose") as proxy, pytest.raises(ConnectionFailed):
        ask(proxy.url, asynchronous, lambda client: client.roll_back_weights())
    assert len(server.engine.weight_commands) == before + 3, "twice would be two versions back"


@both
def test_stream_is_retried_only_until_it_has_started(
    server: LiveServer, asynchronous: bool
) -> None:
    async def asked(url: str) -> list[Any]:
        async with AsyncClient(url, timeout_s=20, retries=QUICK) as client:
            return [event async for event in client.stream(BATCH, sampling=SHORT)]

    def streamed(url: str) -> list[Any]:
        if asynchronous:
            return asyncio.run(asked(url))
        with Client(url, timeout_s=20, retries=QUICK) as client:
            return list(client.stream(BATCH, sampling=SHORT))

    with flaky(server.url, "refuse", "refuse") as proxy:
        assert isinstance(streamed(proxy.url)[-1], Done) and proxy.connections == 3
    with flaky(server.url, "lose") as proxy:
        with pytest.raises(ConnectionFailed):
            streamed(proxy.url)
        assert proxy.connections == 1


@both
def test_unreachable_server_raises_not_reached(asynchronous: bool) -> None:
    with pytest.raises(NotReached):
        ask("http://127.0.0.1:1", asynchronous, lambda client: client.weights())
    assert ask("http://127.0.0.1:1", asynchronous, lambda client: client.is_ready()) is False


def test_client_error_classes_have_the_documented_bases() -> None:
    assert issubclass(TooLarge, InvalidRequest) and issubclass(NotReached, ConnectionFailed)
    assert issubclass(ServerError, TltClientError)
    for error in (QueueFull, Unauthenticated, EngineFailed):
        assert error.__bases__ == (ServerError,) and error.__doc__
