"""The synchronous client of the native dialect. `calls` and `flows` say what is sent and how it is
read, once for both clients.

An item that failed inside a batch is an `ItemResult` with `error`; a request that was refused
raises the `ServerError` of its code. A rollout is a batch that goes on without its client:
`generate(..., detach=True)`.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from os import PathLike
from types import TracebackType
from typing import Any, Literal, Self, overload

from tlt_client import calls, exchanges, flows
from tlt_client.calls import Fields, Items
from tlt_client.exchanges import Of
from tlt_client.retries import NEVER, Retries
from tlt_client.rollouts import Rollout
from tlt_client.tls import Tls
from tlt_client.transport import Transport, batch_key
from tlt_client.wire import (
    AbortReply,
    DrafterSamples,
    EngineState,
    Reply,
    RolloutSummary,
    StreamEvent,
    Weights,
)


class Client:
    """Blocking client. `timeout_s` bounds one wait for the network, not a generation: for that give
    `generate` a `timeout_s`, and a `queue_timeout_s` for the time until the engine starts it. Of
    what waits, a lower `priority` starts first. `api_key` is sent as the bearer token; `tls` says
    which servers to trust.

    With `retries` a call that failed and may succeed later is sent again. So that a batch never
    runs twice, it then has an idempotency key, yours or a new one, and is a rollout: it goes on
    when this client leaves. A stream is sent again only until it has started.
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
        self,
        items: Items,
        *,
        sampling: Fields = None,
        timeout_s: float | None = None,
        queue_timeout_s: float | None = None,
        priority: int = 0,
        idempotency_key: str | None = None,
        detach: Literal[False] = False,
    ) -> Reply: ...

    @overload
    def generate(
        self,
        items: Items,
        *,
        sampling: Fields = None,
        timeout_s: float | None = None,
        queue_timeout_s: float | None = None,
        priority: int = 0,
        idempotency_key: str | None = None,
        detach: Literal[True],
    ) -> Rollout: ...

    def generate(
        self,
        items: Items,
        *,
        sampling: Fields = None,
        timeout_s: float | None = None,
        queue_timeout_s: float | None = None,
        priority: int = 0,
        idempotency_key: str | None = None,
        detach: bool = False,
    ) -> Reply | Rollout:
        """Return the whole reply; with `detach` return at once a handle of its rollout.

        With an `idempotency_key`, such as a UUID, the same call may be repeated after any failure:
        it never runs twice.
        """
        key = batch_key(idempotency_key, self._transport.retries)
        batch = (items, sampling, timeout_s, queue_timeout_s, priority, key)
        if detach:
            id = self._transport.ask(calls.detach(*batch))
            return Rollout(self._transport, id)
        return self._transport.ask(calls.generate(*batch))

    def stream(
        self,
        items: Items,
        *,
        sampling: Fields = None,
        timeout_s: float | None = None,
        queue_timeout_s: float | None = None,
        priority: int = 0,
    ) -> Generator[StreamEvent, None, None]:
        """Yield tokens as they come, each item as it ends, then one `Done`. Closing the iterator
        aborts the items that still run.
        """
        call = calls.stream(items, sampling, timeout_s, queue_timeout_s, priority)
        return self._transport.events(call)

    def rollout(self, id: str) -> Rollout:
        """Return a handle of a rollout that was started before; nothing is sent."""
        return Rollout(self._transport, id)

    def rollouts(self) -> list[RolloutSummary]:
        """Return this key's rollouts, oldest first; with the scope operate, those of all keys."""
        return self._transport.ask(calls.rollouts())

    def server_info(self) -> Mapping[str, Any]:
        """Return the server's model, engine, limits and settings."""
        return self._transport.ask(calls.server_info())

    def strategy(self) -> Mapping[str, Any]:
        """Return the policy in force, its arms and pins, the strategy of the last step, what is
        expected of it, and the last switches with their reasons.
        """
        return self._transport.ask(calls.strategy())

    def drafter(self) -> Mapping[str, Any]:
        """Return the drafters that are served, with their acceptance of late, and what is recorded
        to train one.
        """
        return self._transport.ask(calls.drafter())

    def train_drafter(self) -> Mapping[str, Any]:
        """Begin a round of training once the server's mode lets it; return the trainer's state."""
        return self._transport.ask(calls.drafter_order("train"))

    def pause_drafter_training(self, for_s: float | None = None) -> Mapping[str, Any]:
        """Train and adopt nothing until `resume_drafter_training`, or for `for_s` seconds from the
        last such call, which change no other pause; return the trainer's state.
        """
        return self._transport.ask(calls.drafter_order("pause", for_s=for_s))

    def resume_drafter_training(self) -> Mapping[str, Any]:
        """Go on after a pause; return the trainer's state."""
        return self._transport.ask(calls.drafter_order("resume"))

    def rollback_drafter(self) -> Mapping[str, Any]:
        """Make the drafter before the live one live again; the target stays."""
        return self._transport.ask(calls.drafter_order("rollback"))

    def export_drafter(self, name: str, layout: str = "eagle3") -> Mapping[str, Any]:
        """Write the live drafter below the server's state directory, in the layout of another
        engine; return where it is.
        """
        return self._transport.ask(calls.export_drafter(name, layout))

    def drafter_samples(self, after: int = 0, *, limit: int = 256) -> DrafterSamples:
        """Return recorded sequences, prompts included, oldest first, as the content of a segment
        file. To go on give `after` of the last reply; none are left once its `left` is 0.
        """
        return self._transport.ask(calls.drafter_samples(after, limit))

    def add_drafter_samples(self, content: bytes) -> Mapping[str, Any]:
        """Hand a server what another server of the same target gave by `drafter_samples`."""
        return self._transport.ask(exchanges.add_drafter_samples(content))

    def load(self) -> int:
        """Return the number of sequences that the server has accepted and not ended."""
        return self._transport.ask(calls.load())

    def drafter_files(self, of: Of = "live") -> Mapping[str, Any]:
        """Return version and files of the live drafter, or of the last `candidate` of the server's
        trainer, with its trial.
        """
        return self._transport.ask(exchanges.drafter_files(of))

    def drafter_file(self, version: str, name: str, *, start: int = 0, of: Of = "live") -> bytes:
        """Return 8 MiB of a file of such a drafter from byte `start` on, or what is left."""
        return self._transport.ask(exchanges.drafter_file(version, name, start, of))

    def fetch_drafter(self, directory: str | PathLike[str], of: Of = "live") -> Mapping[str, Any]:
        """Write these files into a directory, as `HttpSender.push_directory` takes them, and return
        what `drafter_files` says of them.
        """
        flow = exchanges.fetch_drafter(directory, of, self._transport.retries)
        return self._transport.run(flow)

    def set_strategy(
        self,
        policy: str,
        strategy: str | None = None,
        *,
        arms: Sequence[str] | None = None,
        pins: Sequence[Mapping[str, Any]] = (),
    ) -> Mapping[str, Any]:
        """Replace the policy (`off`, `fixed` with a strategy such as "eagle:7x4x16", `beg`,
        `goodput`) between two steps; this never changes a token. Where the answer names it under
        `preparing`, its kernels are still compiled: `strategy` tells when it is in force.

        `arms`: drafters and strategies that the policy may choose from. `pins`: strategies that
        hold in its place, such as {"batch": [1, 8], "strategy": "eagle:7x1x8"}.
        """
        return self._transport.ask(calls.set_strategy(policy, strategy, arms, pins))

    def pause(
        self, in_flight: str = "continue", *, new_requests: str = "wait", clear_cache: bool = False
    ) -> EngineState:
        """Stop generating until `resume`. `in_flight`: accepted sequences keep their KV
        (`continue`), give it back and compute it again (`recompute`), end with what they have
        (`abort`), or end first (`drain`). New requests `wait`, or get a 503 (`refuse`).
        """
        return self._transport.ask(calls.pause(in_flight, new_requests, clear_cache))

    def resume(self) -> EngineState:
        """Go on with paused sequences and waiting requests."""
        return self._transport.ask(calls.resume())

    def abort(self, *ids: str, all: bool = False) -> AbortReply:
        """End the items of these ids, or `all` that are open, with what they have; their replies
        say finish_reason "abort". An id that is not open has ended already.
        """
        return self._transport.ask(calls.abort(ids, all))

    def sleep(self, *memory: str, in_flight: str = "recompute") -> EngineState:
        """Give memory back: "weights", "kv_cache", or without a name both. New requests are refused
        until all is awake. Accepted sequences go on then with the same tokens (`recompute`), end
        with what they have (`abort`), or end first (`drain`).
        """
        return self._transport.ask(calls.sleep(memory, in_flight))

    def wake(self, *memory: str) -> EngineState:
        """Take memory again, weights bit for bit as they were; without a name all of it."""
        return self._transport.ask(calls.wake(memory))

    def clear_cache(self, *, unless_held: bool = False) -> EngineState:
        """Forget every cached prefix; running sequences keep their own KV. With `unless_held` raise
        `Conflict` instead while sequences hold KV.
        """
        return self._transport.ask(calls.clear_cache(unless_held))

    def update_weights(
        self, path: str | PathLike[str], version: str, **fields: Any
    ) -> Mapping[str, Any]:
        """Push the safetensors directory `path`, below the server's weight root; return once it is
        live (or staged, or refused).

        `fields` are further ones of the manifest: `role`, `drafter_path`, `tensors`, `in_flight`
        (continue, recompute, abort, drain), `commit`.
        """
        return self._transport.ask(calls.update_weights(path, version, fields))

    def push_weights(self, version: str, **fields: Any) -> Mapping[str, Any]:
        """Push by any channel, as the manifest's `fields` say; `tlt_client.channels` sends the
        tensors.
        """
        return self._transport.ask(calls.push_weights(version, fields))

    def put_weights(
        self, version: str, part: str, data: bytes, *, start: int, total: int
    ) -> Mapping[str, Any]:
        """Send bytes `[start, start + len(data))` of a part of a version; the reply says how many
        bytes the server has.
        """
        return self._transport.ask(calls.put_weights(version, part, data, start, total))

    def weights_part(self, version: str, part: str) -> Mapping[str, Any]:
        """Return how much of a part the server has."""
        return self._transport.ask(calls.weights_part(version, part))

    def join_group(self, name: str, **fields: Any) -> Mapping[str, Any]:
        """Let the server join the process group `name`; return once all ranks have joined.
        `fields`: `master_address`, `master_port`, `rank_offset`, `world_size`, `backend`,
        `prefixed`.
        """
        return self._transport.ask(calls.join_group(name, fields))

    def leave_group(self, name: str) -> Mapping[str, Any]:
        return self._transport.ask(calls.leave_group(name))

    def commit_weights(self, version: str) -> Mapping[str, Any]:
        """Make a push live that was staged with `commit=False`; its state is `unchanged` where the
        version is live already.
        """
        return self._transport.ask(calls.commit_weights(version))

    def abort_weights(self, version: str = "", *, upload_only: bool = False) -> Mapping[str, Any]:
        """End the push of this version, or without a version the open one, before it is committed;
        live weights do not change. With `upload_only` drop only the parts of the version that came
        by http and are not being pushed.
        """
        return self._transport.ask(calls.abort_weights(version, upload_only))

    def roll_back_weights(self, **fields: Any) -> Mapping[str, Any]:
        """Undo the last push. With `to` make that version live again, so that a repeated call is
        safe; `role` rolls back the target or the drafter alone.
        """
        return self._transport.ask(calls.roll_back_weights(fields))

    def weights(self) -> Weights:
        """Return the live versions, those that a rollback restores, open pushes and uploads."""
        return self._transport.ask(calls.weights())

    def unload_adapter(self, name: str, in_flight: str = "drain") -> Mapping[str, Any]:
        """Unload a LoRA adapter once its requests have ended, or with `abort` end them with what
        they have. `NotFound`: none is loaded by this name.
        """
        return self._transport.ask(calls.unload_adapter(name, in_flight))

    def weight_checksums(self) -> Mapping[str, str]:
        """Return the mix64 checksum of every live tensor (`tlt_client.channels.checksums`)."""
        return self._transport.ask(calls.weight_checksums("checksum"))

    def remember_weight_checksums(self) -> Mapping[str, str]:
        """Return the same checksums; the server remembers them for `compare_weights`."""
        return self._transport.ask(calls.weight_checksums("snapshot"))

    def compare_weights(self, baseline: Mapping[str, str] | None = None) -> list[str]:
        """Return the names of tensors that differ from a `baseline` of checksums, or without one
        from the checksums that the server remembers.
        """
        return self._transport.ask(calls.compare_weights(baseline))

    def metrics(self) -> str:
        """Return the Prometheus exposition, as text."""
        return self._transport.ask(calls.metrics())

    def is_ready(self) -> bool:
        """Return whether a request sent now would be taken; an unreachable server is not ready."""
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
