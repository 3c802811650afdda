"""An engine without a model: speaks the command and event protocol and echoes prompts,
deterministically.

Output token i is prompt token i modulo the prompt's length; `per_step` tokens come in one output,
as with speculation. Some tokens in a prompt stand for an event: see the constants. Runs as a
coroutine in a test's loop, or as a process in place of the real engine.
"""

import asyncio
import json
import os
import sys
import time
from array import array
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from tlt_server.wire.commands import (
    Abort,
    AbortWeights,
    ClearCache,
    CommitWeights,
    ControlCommand,
    JoinGroup,
    LeaveGroup,
    Manifest,
    NameWeights,
    Pause,
    PushWeights,
    ReadWeights,
    Resume,
    RollbackWeights,
    SetPolicy,
    Sleep,
    Stop,
    Submit,
    UnloadAdapter,
    WakeUp,
    WeightCommand,
    decode_command,
)
from tlt_server.wire.events import (
    ControlReport,
    EngineInfo,
    Failed,
    Heartbeat,
    Phase,
    Ready,
    WeightReport,
    WeightState,
    of_step,
)
from tlt_server.wire.fingerprint import Fingerprint
from tlt_server.wire.kept import StartedFile
from tlt_server.wire.records import (
    OFF,
    Cycle,
    GenerateRequest,
    StepContext,
    StepOutput,
    Switch,
    TokenLogprobs,
    encode,
)

EOS = 256
DIES, FAILS, HANGS = (
    290,
    291,
    292,
)  # the engine ends; this request ends with an error; it never gives a token
UNPREPARED = "eagle:9x1x10"  # its kernels cannot be compiled
UNANSWERED = "fake engine: unanswered"  # begins a line on standard error
LATE = 293  # it is not begun in time
INFO = EngineInfo(
    model="fake",
    weight_version="v0",
    vocab_size=300,
    max_model_len=512,
    eos_token_ids=[EOS],
    pages=64,
    page_size=16,
    max_running=8,
    drafter="",
    policy="off",
    numerics="strict",
    fingerprint=Fingerprint(1, "float32", "none", "strict 1"),
    attention="none",
    dtype="float32",
    device="cpu",
    threads=1,
    prepared="all strategies",
    phases={"load": 0.01},
    pid=os.getpid(),
)


@dataclass
class Running:
    request: GenerateRequest
    aborted: str | None = None
    held: bool = False  # it has KV
    emitted_s: float = 0.0  # when it had tokens last

    def __post_init__(self) -> None:
        self.request = msgspec.structs.replace(self.request, token_ids=[*self.request.token_ids])
        self.sent = len(self.request.generated)

    def step(self, per_step: int, version: str, alternatives: int = 1) -> StepOutput | None:
        request, sampling, self.held = self.request, self.request.sampling, True
        tokens: list[int] = []
        ends = (*(() if sampling.ignore_eos else (EOS,)), *sampling.stop_token_ids)
        reason, stop_reason = self.aborted or ("length" if sampling.max_tokens == 0 else None), None
        if HANGS in request.token_ids and reason is None:
            return None
        while len(tokens) < per_step and reason is None:
            token = request.token_ids[(self.sent + len(tokens)) % len(request.token_ids)]
            tokens.append(token)
            if token in ends:
                reason, stop_reason = "stop", token
            elif self.sent + len(tokens) >= sampling.max_tokens:
                reason = "length"
        first, self.sent = self.sent == 0, self.sent + len(tokens)
        extra = [
            TokenLogprobs(
                (token, *range(alternatives - 1)),
                (-0.5, *(-1 - i / 7 for i in range(alternatives - 1))),
            )
            for token in tokens
        ]
        return StepOutput(
            id=request.id,
            token_ids=tokens,
            logprobs=[-0.5] * len(tokens),
            raw_logprobs=[-1.0] * len(tokens),
            top_logprobs=extra if sampling.logprobs else None,
            prompt_logprobs=[
                None,
                *(TokenLogprobs((token, 65), (-2.0, -0.1)) for token in request.token_ids[1:]),
            ]
            if first and sampling.prompt_logprobs is not None
            else None,
            finish_reason=reason,
            stop_reason=stop_reason,
            weight_version=version,
            drafted=3 if tokens else 0,
            accepted=max(0, len(tokens) - 1),
        )


@dataclass
class FakeEngine:
    directory: Path
    per_step: int = 3
    step_s: float = 0.001
    alternatives: int = 1  # per token, with logprobs
    max_model_len: int = INFO.max_model_len
    drafter: str = ""  # what it says it has loaded
    spooled: bool = False
    leaves: int = 1  # its fingerprint
    lost: dict[str, str] = field(default_factory=dict)
    fails: str = ""  # every push and commit ends with this error's code
    deaf: bool = False  # hears and says nothing
    dies: bool = False
    running: dict[str, Running] = field(default_factory=dict)
    submitted: list[GenerateRequest] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    policies: list[SetPolicy] = field(default_factory=list)
    prepares: bool = True  # each policy, at once
    preparing: str = ""  # the command that is not answered
    switches: list[Switch] = field(default_factory=lambda: [Switch(1.5, "off", "", "start", 1)])
    weight_commands: list[WeightCommand] = field(default_factory=list)
    weights: WeightState = WeightState(target="v0")
    reads: bool = True  # what is pushed, before it fails
    controls: list[ControlCommand] = field(default_factory=list)
    paused: bool = False
    asleep: set[str] = field(default_factory=set)
    draining: list[Pause | Sleep] = field(default_factory=list)
    unloading: list[str] = field(default_factory=list)
    staged: Manifest | None = None
    contents: dict[str, str] = field(default_factory=dict)  # name -> the version that was pushed

    @property
    def manifests(self) -> list[Manifest]:
        """The pushes so far."""
        return [each.manifest for each in self.weight_commands if isinstance(each, PushWeights)]

    async def run(self, *, startup: bool = True) -> int:
        """Answer commands until `Stop`; return the exit status."""
        context = zmq.asyncio.Context()
        self._commands, self._events = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        self._commands.connect(f"ipc://{self.directory}/commands")
        self._events.connect(f"ipc://{self.directory}/events")
        try:
            if startup:
                await self._events.send(encode(Phase("load", 0.01)))
                await self._events.send(
                    encode(
                        Ready(
                            msgspec.structs.replace(
                                INFO,
                                drafter=self.drafter,
                                max_model_len=self.max_model_len,
                                weight_version=self.weights.target,
                                spooled=self.spooled,
                                fingerprint=msgspec.structs.replace(
                                    INFO.fingerprint, leaves=self.leaves
                                ),
                                lost=self.lost,
                            )
                        )
                    )
                )
            return await self._loop()
        finally:
            context.destroy(linger=200)

    async def _loop(self) -> int:
        parent, begun, beat_s = os.getppid(), StartedFile(self.directory), time.monotonic()
        while os.getppid() == parent:  # ends with a killed test
            await asyncio.sleep(self.step_s)
            if self.deaf:
                continue
            while await self._commands.poll(0 if self.running else 5) and not self.deaf:
                command = decode_command(await self._commands.recv())
                match command:
                    case Submit():
                        self.submitted += command.requests
                        self.running.update(
                            (request.id, Running(request)) for request in command.requests
                        )
                        begun.note(list(self.running))
                    case Abort():
                        self.aborted += command.ids
                        for id in list(self.running) if command.all else command.ids:
                            if id in self.running:
                                self.running[id].aborted = command.finish_reason
                    case SetPolicy():
                        self.policies.append(msgspec.structs.replace(command, id=""))
                        if self.preparing:
                            error = "conflict", "another policy was set"
                            await self._events.send(encode(ControlReport(self.preparing, error)))
                        self.preparing = "" if self.prepares else command.id
                        if self.prepares:
                            await self._events.send(encode(self._prepared(command)))
                    case Stop():
                        return 0
                    case Pause() | Resume() | Sleep() | WakeUp() | ClearCache():
                        self.controls.append(command)
                        await self._control(command)
                    case _:
                        self.weight_commands.append(command)
                        await self._answer(command)
            if self.deaf:
                continue  # since it waited for a command
            if self.dies or any(
                DIES in running.request.token_ids for running in self.running.values()
            ):
                return 7
            if not self.paused and not self.asleep:
                await self._step()
            if not self.running:
                for waiting in self.draining:
                    self._halt(waiting)
                    await self._events.send(encode(ControlReport(waiting.id)))
                self.draining.clear()
            if time.monotonic() - beat_s > 0.2:
                beat_s = time.monotonic()
                await self._events.send(encode(Heartbeat()))
        return 0

    @staticmethod
    def _prepared(command: SetPolicy) -> ControlReport:
        """Refuse one strategy, and say of others that they are in force."""
        if command.strategy and command.strategy.name == UNPREPARED:
            return ControlReport(command.id, ("unavailable", "its kernels are not compiled"))
        return ControlReport(command.id, detail=f"{command.name} is prepared")

    async def _control(self, command: ControlCommand) -> None:
        match command:
            case Pause(_, in_flight) | Sleep(_, _, in_flight) if (
                in_flight == "drain" and self.running
            ):
                self.draining.append(command)
                leave_unanswered(command)
                return
            case Pause(_, in_flight) | Sleep(_, _, in_flight):
                if in_flight == "abort":
                    for running in self.running.values():
                        running.aborted = "abort"
                    await self._step()
                for running in self.running.values():
                    running.held &= in_flight != "recompute"
                self._halt(command)
            case Resume():
                self.paused = False
            case WakeUp(_, memory):
                self.asleep -= {*memory}
            case ClearCache(id, unless_held) if unless_held and any(
                running.held for running in self.running.values()
            ):
                await self._events.send(encode(ControlReport(id, ("conflict", "sequences run"))))
                return
        await self._events.send(encode(ControlReport(command.id)))

    def _halt(self, command: Pause | Sleep) -> None:
        if isinstance(command, Sleep):
            self.asleep |= {*command.memory}
        else:
            self.paused = True

    async def _answer(self, command: WeightCommand) -> None:
        """Commits at once; a path that names an error's code is answered by that error, a path or
        group `hangs` not at all.
        """
        values, shape, ids = b"", list[int](), [command.id]
        result = "looked"
        error = None
        version = ""
        role = ""
        match command:
            case PushWeights(_, manifest):
                version = manifest.version or "named"
                role = manifest.role
                result = "committed" if manifest.commit else "staged"
                if manifest.group == "spoils":
                    self.weights = msgspec.structs.replace(
                        self.weights, quarantined={"target": "half of it is another version"}
                    )
                    result = "channel_broken"
                    error = ("channel_broken", "channel_broken: out of luck")
                if manifest.path == "hangs":
                    leave_unanswered(command)
                    return
                fails = self.fails or manifest.path
                if fails in ("forbidden", "weights_refused", "conflict", "push_failed"):
                    result, error = fails, (fails, f"{fails}: out of luck")
                self.staged = manifest if result == "staged" else None
            case CommitWeights() if self.fails:
                result, error = self.fails, (self.fails, f"{self.fails}: out of luck")
            case CommitWeights(_, version, "") if (
                version == self.weights.target and not self.staged
            ):
                result, role = "unchanged", "target"
            case CommitWeights(_, version, name):
                manifest, self.staged = self.staged or Manifest(), None
                version = version or manifest.version or "named"
                if name:
                    self.contents[name], version = version, name
                result, role = "committed", manifest.role
            case NameWeights(_, version):
                result, role, live = "named", "target", self.weights.target
                self.contents[version] = self.contents.get(live, live)
                self.weights = WeightState(target=version)
            case ReadWeights(_, _, rows):
                values, shape = array("f", [0.5] * rows).tobytes(), [rows]
            case AbortWeights(_, version):
                result, self.staged = "aborted", None
            case JoinGroup(_, "hangs"):
                leave_unanswered(command)
                return
            case JoinGroup(_, name):
                result = "joined"
                self.weights = msgspec.structs.replace(self.weights, groups=[name])
            case LeaveGroup():
                result, self.weights = "left", msgspec.structs.replace(self.weights, groups=[])
            case RollbackWeights(_, to):
                version, result, role = to or "v0", "rolled_back", "target"
            case UnloadAdapter(id, "busy", "drain"):
                self.unloading.append(id)  # a request that runs with it does not end
                return
            case UnloadAdapter(_, name):
                ids += self.unloading
                result, role = "unloaded", "adapter"
                left = {at: own for at, own in self.weights.adapters.items() if at != name}
                if left == self.weights.adapters:
                    result, error = "not_found", ("not_found", f"adapter {name!r} is not loaded")
                self.weights = msgspec.structs.replace(self.weights, adapters=left)
        live = version or self.weights.target
        sums = {"w": f"sha256:{self.contents.get(live, live)}"}
        if role == "adapter" and result == "committed":
            loaded = self.weights.adapters | {manifest.adapter: version}
            self.weights = msgspec.structs.replace(self.weights, adapters=loaded)
        elif result in ("committed", "rolled_back"):
            self.weights = WeightState(target=version, previous={"target": self.weights.target})
        phases = (
            {"read": 0.2, "commit": 0.001}
            if result != "looked" and (error is None or self.reads)
            else {}
        )
        for id in ids:
            await self._events.send(
                encode(
                    WeightReport(
                        id=id,
                        state=self.weights,
                        result=result,
                        error=error,
                        version=version,
                        role=role,
                        checksums=sums,
                        phases=phases,
                        pause_ms=1.0,
                        values=values,
                        shape=shape,
                    )
                )
            )

    async def _step(self) -> None:
        outputs, gaps, now_s = [], Counter[tuple[float, int]](), time.monotonic()
        for id, running in list(self.running.items()):
            output = running.step(self.per_step, self.weights.target, self.alternatives)
            for token, code in ((FAILS, "engine_failed"), (LATE, "queue_timeout")):
                if token in running.request.token_ids:
                    output = StepOutput(
                        id=id,
                        token_ids=[],
                        logprobs=[],
                        finish_reason="error",
                        error=(code, "out of luck"),
                    )
            if output is not None:
                outputs.append(output)
                if running.emitted_s and output.token_ids:
                    gaps[now_s - running.emitted_s, len(output.token_ids)] += 1
                running.emitted_s = now_s
                if output.finish_reason is not None:
                    del self.running[id]
        if outputs:
            context = StepContext(len(outputs), 0, 10.0, 0)
            cycle = Cycle(
                context=context,
                strategy=OFF,
                rows=1,
                emitted=1,
                accepted=(2,),
                drafted=3,
                step_s=self.step_s,
                predicted_s=self.step_s,
            )
            gauges = {"running": float(len(self.running)), "pages_free": 60.0, "odd_gauge": 1.0}
            gauges |= {"cost_error": 0.125, "expected_rate": 900.0, "outlook_ratio_eagle": 0.75}
            switches, self.switches = self.switches, []
            waits = [(*gap, count) for gap, count in gaps.items()]
            for event in of_step(outputs, gauges, cycle, switches, waits):
                await self._events.send(encode(event))


STEPS_S = {"slow": 0.02}  # time of a step by name of the behaviour


def leave_unanswered(command: object) -> None:
    """Report a command that waits, so that a test may wait until it has come."""
    print(f"{UNANSWERED} {type(command).__name__}", file=sys.stderr, flush=True)


def main() -> int:
    """Run as a process: the arguments are the directory and the behaviour, by name or as options;
    the configuration is one line on standard input, empty for a test's.
    """
    directory, mode = Path(sys.argv[-1]), sys.argv[1]
    json.loads(sys.stdin.readline() or "{}")
    options = json.loads(mode) if mode.startswith("{") else {"step_s": STEPS_S.get(mode, 0.001)}
    if mode == "exits":
        return 3
    if mode == "starts once" and directory.name != "1":
        time.sleep(60)  # and is killed before that

    async def run() -> int:
        if mode == "refuses":
            socket = zmq.asyncio.Context.instance().socket(zmq.PUSH)
            socket.connect(f"ipc://{directory}/events")
            await socket.send(
                encode(Failed("model", "model.safetensors is truncated; fetch it again"))
            )
            await asyncio.sleep(1)
            return 2
        return await FakeEngine(directory, **options).run()

    return asyncio.run(run())


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)
