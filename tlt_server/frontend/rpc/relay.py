"""A gateway's use of this server's engine: its commands reach the engine client, which has the
engine's epochs, and events for it are collected here.

`link` has the rules of attaching and the transport; a relay reads commands and writes events by two
callables. Events are gathered for 20 ms, but sent at once if a sequence ends or its client
streams. Sequences have a prefix inside the server, since ids of two gateways, or of direct
clients, may be equal.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import structlog
from msgspec.structs import replace

from tlt_server.errors import Cancelled, InvalidRequest, QueueFull, TltError
from tlt_server.frontend.link.client import EngineClient
from tlt_server.frontend.link.link import Death
from tlt_server.frontend.link.submission import Submission
from tlt_server.wire.commands import (
    Abort,
    ControlCommand,
    HandOver,
    LookAtWeights,
    ReadWeights,
    Recompute,
    SetPolicy,
    Submit,
    WeightCommand,
)
from tlt_server.wire.events import (
    MAX_OUTPUTS,
    ControlReport,
    EngineInfo,
    Event,
    Outputs,
    Phase,
    PhaseProgress,
    Ready,
)
from tlt_server.wire.kept import OTHERS
from tlt_server.wire.link import (
    Attach,
    Attached,
    Ended,
    LinkCommand,
    LinkEvent,
    Ping,
    event_messages,
    shifted,
)
from tlt_server.wire.packed import PackedIds
from tlt_server.wire.records import GenerateRequest, StepOutput, last_output

MAX_OPEN = 2**16  # sequences at which a gateway gets no further ones; its admission allows fewer
MAX_ID_CHARS = 256
GATHER_S = 0.02
PREPARING_S = 86400.0  # for which a policy may be prepared

log = structlog.get_logger()


class GatewayRelay:
    def __init__(
        self,
        client: EngineClient,
        attach: Attach,
        prefix: str,
        url: str,
        read: Callable[[], Awaitable[LinkCommand]],
        write: Callable[[bytes], Awaitable[None]],
    ) -> None:
        """`prefix`: of ids in the server. `url`: the server's own. `read`: returns the next
        command. `write`: sends a message. Errors of both end the stream.
        """
        self.attach = attach
        self.gateway = f"{attach.gateway or 'a gateway'} of the fleet {attach.fleet}"
        self._client, self._prefix, self._url = client, prefix, url
        self._read, self._write = read, write
        self._ended: Ended | None = None  # why the stream ends; nothing is sent after it
        self.over = asyncio.Event()  # the gateway's sequences are aborted
        self._ready = False
        self._open: set[Submission] = set()
        self._ids: set[str] = set()  # the gateway's, of sequences that have not ended
        self._events: list[LinkEvent] = []
        self._some, self._hurry = asyncio.Event(), asyncio.Event()

    async def run(self) -> Ended:
        """Carry out commands and send events until the stream ends, and return why."""
        self._client.relay = self
        self._put(Attached(self.attach.epoch, self._url))
        telling = asyncio.create_task(self._tell())
        try:
            async with asyncio.TaskGroup() as self._tasks:
                self._tasks.create_task(self._begin())
                self._tasks.create_task(self._listen())
                while self._ended is None:
                    change = self._client.changes.next
                    self._client.check_taking()
                    await change.wait()
                raise Cancelled(self._ended.message)
        except* TltError as errors:
            self.end(Ended.of(errors.exceptions[0]))
        finally:
            self._client.relay = None
            for submission in self._open:
                submission.close()
            self.over.set()
            ended = self._ended or Ended.of(Cancelled("the server has left the stream"))
            self._events.append(ended)
            self._some.set()
            self._hurry.set()
            await telling
        return ended

    def end(self, ended: Ended) -> None:
        """End the stream, unless it ends already."""
        self._ended = self._ended or ended
        self._client.changes.tell()

    # from the gateway

    async def _listen(self) -> None:
        while True:
            self._take(await self._read())
            await asyncio.sleep(0)  # tasks of a command start before the next one

    def _take(self, command: LinkCommand) -> None:
        """Carry out a command. `InvalidRequest` if it is not one of this stream."""
        match command:
            case Ping():
                self._put(command)
            case _ if not self._ready:
                raise InvalidRequest(f"{type(command).__name__} came before the engine is ready")
            case Submit(requests):
                self._submit(requests)
            case Abort(ids, finish_reason):
                named = self._ids if command.all else ids
                self._client.abort([self._prefix + id for id in named], finish_reason)
            case Recompute():
                self._client.recompute(command)
            case Attach():
                raise InvalidRequest("a stream attaches once; begin another one")
            case HandOver():
                raise InvalidRequest("a gateway may not have weights written to a directory here")
            case _:
                if not isinstance(command, LookAtWeights | ReadWeights):
                    log.info("audit", link=self.gateway, command=type(command).__name__)
                self._tasks.create_task(self._answer(command))

    async def _begin(self) -> None:
        """Report the engine once it is ready, without the pause and sleep of the gateway before. An
        open push is left, since the fleet's record says whether it is committed.
        """
        client = self._client
        while not client.replica.runs:
            await client.changes.next.wait()
        if client.pauses.asleep:
            await client.pauses.wake(client.pauses.asleep)
        if client.pauses.paused:
            await client.pauses.resume()
        assert client.info is not None
        self._put(Ready(replace(client.info, lost=client.versions.lost)))
        self._ready = True

    def _submit(self, requests: list[GenerateRequest]) -> None:
        info, now_s, fit = self._client.info, time.monotonic(), defaultdict[Any, Any](list)
        assert info is not None
        for request in requests:
            if request.id in self._ids:
                raise InvalidRequest(
                    f"two open sequences have the id {request.id[:MAX_ID_CHARS]!r}"
                )
            if len(self._ids) == MAX_OPEN:
                self._end(request, QueueFull(f"{MAX_OPEN} sequences of the gateway are open"))
            elif fault := misfit(request, info):
                self._end(request, InvalidRequest(fault))
            else:
                self._ids.add(request.id)
                own = replace(request, id=self._prefix + request.id)
                fit[request.owner].append(shifted(own, now_s))
        for few in fit.values():  # a batch has one owner, whose share it counts to
            # An error ends the stream, so that the gateway places them elsewhere.
            submission = self._client.submit(few, accepted=True)
            self._open.add(submission)
            hurried = not all(each.patient for each in few)
            self._tasks.create_task(self._pump(submission, hurried=hurried))

    def _end(self, request: GenerateRequest, error: TltError) -> None:
        self._pass_on([last_output(request.id, "error", (error.code, error.message))])

    async def _pump(self, submission: Submission, *, hurried: bool) -> None:
        """Pass on the outputs of a batch; `hurried`: a client streams."""
        async for few, _ in submission.slices(lambda output: 1, MAX_OUTPUTS):
            own = [replace(each, id=each.id.removeprefix(self._prefix)) for each in few]
            ended = any(output.finish_reason is not None for output in few)
            self._pass_on(own, hurried=hurried or ended)
        self._open.discard(submission)

    async def _answer(self, command: ControlCommand | SetPolicy | WeightCommand) -> None:
        """Carry out a command, and send its report."""
        client, error, detail = self._client, None, ""
        try:
            if isinstance(command, SetPolicy):
                await client.policies.ask(command, PREPARING_S)
                detail = client.policies.prepared
            elif isinstance(command, ControlCommand):
                await client.pauses.carry_out(command)
            else:
                async with client.adopting:  # is over soon; the commands keep their order
                    pass
                report = await client.weights(replace(command, id=client.command_id()))
                self._put(replace(report, id=command.id))
                return
        except TltError as failed:
            if isinstance(command, WeightCommand):
                raise  # it may be done or not, so the stream ends
            error = failed.code, failed.message
        self._put(ControlReport(command.id, error, detail))

    # from the engine

    def took(self, event: Event) -> None:
        """Take in an event that the engine client has applied."""
        match event:
            case Outputs():  # the gateway's come by `_pump` in the loop's next turn
                self._put(replace(event, outputs=[]), hurried=False)
            case Phase() | PhaseProgress():
                self._put(event)

    def died(self, death: Death, restart_in_s: float | None, start_s: float) -> None:
        """Report a death of the engine, whose sequences are then the gateway's to continue."""
        parts = [id.partition(self._prefix) for id in death.started]
        ran = sorted({OTHERS if before else own for before, _, own in parts})
        error = death.error.code, death.error.message
        self.end(Ended(*error, death.ending, ran, restart_in_s, start_s))

    # to the gateway

    def _pass_on(self, outputs: list[StepOutput], *, hurried: bool = True) -> None:
        self._ids -= {output.id for output in outputs if output.finish_reason is not None}
        match self._events:
            case [*_, Outputs(outputs=those)] if self._ended is None:
                those.extend(outputs)
                if hurried:
                    self._hurry.set()
            case _:
                event = Outputs(outputs, {**self._client.replica.gauges})
                self._put(event, hurried=hurried)

    def _put(self, event: LinkEvent, *, hurried: bool = True) -> None:
        """Send an event within `GATHER_S`, or if `hurried` in the loop's next turn."""
        if self._ended is None:
            self._events.append(event)
            self._some.set()
            if hurried:
                self._hurry.set()

    async def _tell(self) -> None:
        """Send events until the last one. If it cannot, the stream ends."""
        events: list[LinkEvent] = []
        try:
            while not (events and isinstance(events[-1], Ended)):
                await self._some.wait()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(GATHER_S):
                        await self._hurry.wait()
                self._some.clear()
                self._hurry.clear()
                events, self._events = self._events, []
                for message in event_messages(events):
                    await self._write(message)
        except TltError as error:
            self.end(Ended.of(error))


def misfit(request: GenerateRequest, info: EngineInfo) -> str:
    """Return the reason why this engine cannot run a request; empty if it can. A gateway has
    checked it against its own limits, which may be those of another model.
    """
    if not (request.id.isprintable() and 0 < len(request.id) <= MAX_ID_CHARS):
        return f"the id {request.id[:MAX_ID_CHARS]!r} must be 1 to {MAX_ID_CHARS} characters"
    given, before = len(request.token_ids), len(request.generated)
    longest = given + max(before, request.sampling.max_tokens)
    if not given or longest > info.max_model_len:
        return (
            f"the prompt of {given} tokens with an output of {longest - given} does not fit: this "
            f"server takes 1 to {info.max_model_len} (max_model_len)"
        )
    for ids in (request.token_ids, request.generated):
        array = (
            np.frombuffer(ids.packed[: 4 * len(ids)], np.int32)
            if isinstance(ids, PackedIds)
            else np.array(ids)
        )
        if len(ids) and not (0 <= array.min() and array.max() < info.vocab_size):
            return f"a token id is not below the vocabulary's size of {info.vocab_size}"
    return ""
