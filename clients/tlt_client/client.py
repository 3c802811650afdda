"""The synchronous client of the native dialect. `calls`, `weight_calls` and `drafter_calls` declare
its operations, once for both clients.

An item that failed inside a batch is an `ItemResult` with `error`; a refused request raises the
`ServerError` of its code. A rollout is a batch that continues without its client: `generate(...,
detach=True)`.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from os import PathLike
from types import TracebackType
from typing import Any, Literal, Self, Unpack, overload

from tlt_client import calls, drafter_calls, flows, weight_calls
from tlt_client.calls import BatchFields, Items, StreamFields
from tlt_client.drafter_calls import Of
from tlt_client.retries import NEVER, Retries
from tlt_client.tls import Tls
from tlt_client.transport import Transport, keyed, operation
from tlt_client.wire import Reply, RolloutReply, StreamEvent


class Operations:
    """The operations that take one call each; both clients have them."""

    rollouts = operation(calls.rollouts)
    server_info = operation(calls.server_info)
    metrics = operation(calls.metrics)
    load = operation(calls.load)
    strategy = operation(calls.strategy)
    set_strategy = operation(calls.set_strategy)
    pause = operation(calls.pause)
    resume = operation(calls.resume)
    abort = operation(calls.abort)
    sleep = operation(calls.sleep)
    wake = operation(calls.wake)
    clear_cache = operation(calls.clear_cache)
    fleet = operation(calls.fleet)
    drain_replica = operation(calls.drain_replica)
    resume_replica = operation(calls.resume_replica)
    restart_replica = operation(calls.restart_replica)
    scale_fleet = operation(calls.scale_fleet)

    update_weights = operation(weight_calls.update_weights)
    push_weights = operation(weight_calls.push_weights)
    put_weights = operation(weight_calls.put_weights)
    weights_part = operation(weight_calls.weights_part)
    join_group = operation(weight_calls.join_group)
    leave_group = operation(weight_calls.leave_group)
    commit_weights = operation(weight_calls.commit_weights)
    abort_weights = operation(weight_calls.abort_weights)
    roll_back_weights = operation(weight_calls.roll_back_weights)
    weights = operation(weight_calls.weights)
    unload_adapter = operation(weight_calls.unload_adapter)
    weight_checksums = operation(weight_calls.weight_checksums)
    remember_weight_checksums = operation(weight_calls.remember_weight_checksums)
    compare_weights = operation(weight_calls.compare_weights)

    drafter = operation(drafter_calls.drafter)
    train_drafter = operation(drafter_calls.train_drafter)
    pause_drafter_training = operation(drafter_calls.pause_drafter_training)
    resume_drafter_training = operation(drafter_calls.resume_drafter_training)
    rollback_drafter = operation(drafter_calls.rollback_drafter)
    export_drafter = operation(drafter_calls.export_drafter)
    drafter_samples = operation(drafter_calls.drafter_samples)
    add_drafter_samples = operation(drafter_calls.add_drafter_samples)
    drafter_files = operation(drafter_calls.drafter_files)
    drafter_file = operation(drafter_calls.drafter_file)


class Rollout:
    """A batch that continues without its client. The server keeps results for `rollout_ttl_s` after
    its end.
    """

    def __init__(self, transport: Transport, id: str) -> None:
        self._transport, self.id = transport, id

    def fetch(self, wait_s: float = 0.0) -> RolloutReply:
        """Return the results so far; with `wait_s` (at most 60) wait until all have ended."""
        return self._transport.ask(calls.fetch(self.id, wait_s))

    def result(self, timeout_s: float = 3600.0) -> Reply:
        """Return the whole reply, waiting even while the server restarts. Raise `TimeoutError` when
        time is up; the rollout continues.
        """
        return self._transport.run(flows.result(self.id, timeout_s))

    def delete(self) -> None:
        """Abort its running items, and delete it."""
        self._transport.ask(calls.delete(self.id))


class Client(Operations):
    """Blocking client. `timeout_s` bounds one wait for the network, not a generation: for that,
    give `generate` a `timeout_s`, and a `queue_timeout_s` for the time until the engine starts it.
    Among waiting requests, a lower `priority` starts first. `api_key`: sent as the bearer token.
    `tls`: which servers to trust.

    With `retries`, a failed call that may succeed later is sent again. So that a batch never runs
    twice, it then has an idempotency key, yours or a new one, and is a rollout: it continues when
    this client leaves. A stream is sent again only if it has not started.
    """

    def __init__(
        self,
        url: str = "http://127.0.0.1:8000",
        *,
        api_key: str | None = None,
        timeout_s: float | None = None,
        tls: Tls | None = None,
        retries: Retries = NEVER,
    ) -> None:
        self._transport = Transport(url, api_key, timeout_s, tls, retries)

    @overload
    def generate(
        self, items: Items, *, detach: Literal[False] = False, **options: Unpack[BatchFields]
    ) -> Reply: ...

    @overload
    def generate(
        self, items: Items, *, detach: Literal[True], **options: Unpack[BatchFields]
    ) -> Rollout: ...

    def generate(
        self, items: Items, *, detach: bool = False, **options: Unpack[BatchFields]
    ) -> Reply | Rollout:
        """Return the whole reply; with `detach`, return a handle of its rollout at once. `options`:
        `sampling`, `timeout_s`, `queue_timeout_s`, `priority`, `idempotency_key`.

        With an `idempotency_key`, such as a UUID, the same call may be repeated after any failure:
        it never runs twice.
        """
        options = keyed(options, self._transport.retries)
        if detach:
            id = self._transport.ask(calls.detach(items, **options))
            return Rollout(self._transport, id)
        return self._transport.ask(calls.generate(items, **options))

    def stream(
        self, items: Items, **options: Unpack[StreamFields]
    ) -> Generator[StreamEvent, None, None]:
        """Yield tokens as they arrive, each item as it ends, then one `Done`. Closing the iterator
        aborts the running items.
        """
        return self._transport.events(calls.stream(items, **options))

    def rollout(self, id: str) -> Rollout:
        """Return a handle of an earlier rollout; sends nothing."""
        return Rollout(self._transport, id)

    def fetch_drafter(self, directory: str | PathLike[str], of: Of = "live") -> Mapping[str, Any]:
        """Write the drafter's files into a directory, in the form of `HttpSender.push_directory`,
        and return the result of `drafter_files`.
        """
        flow = drafter_calls.fetch_drafter(directory, of, self._transport.retries)
        return self._transport.run(flow)

    def is_ready(self) -> bool:
        """Return True if a request sent now would be accepted; False for an unreachable server."""
        return self._transport.run(flows.ready())

    def close(self) -> None:
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
