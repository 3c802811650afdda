"""Everything at once: hostile requests over HTTP and gRPC, engines that are killed, pushes of
weights, a disk that is full. Each sound request that completes has the bits of an undisturbed run.

The pushes carry the served target again, and drafters that differ: no push may change a token. A
shard of the whole is one server and one seed; 24 of them make the million of requests.
"""

import asyncio
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
import uvloop
from google.protobuf import json_format

from tests.e2e.conftest import PAIR
from tests.e2e.hostile_bodies import SECRET, generate
from tests.e2e.hostile_requests import LIMITS, attempt
from tests.e2e.test_crashes import AT_ONCE
from tests.e2e.test_hostile import ANSWER_S, CONTINUE, SOUND, Answer, free_pages, judge, send
from tests.processes import engine, engines
from tests.waiting import until
from tlt_client import AsyncClient, Client, ServerError
from tlt_client.channels.checkpoint import CALIBRATION
from tlt_client.rpc import GenerateRequest, RolloutServiceStub
from tlt_server.demo.push import perturbed_copy
from tlt_server.demo.rounds import look
from tlt_server.demo.server import ServerProcess
from tlt_server.demo.workload import DRAFTER, TARGET

ATTACKERS, CALLERS = 32, 16
DISK_MB = 96
SERVICE = "/tlt.v1.RolloutService/"
UNARY = ("GenerateBatch", "Detach", "GetRollout", "DeleteRollout", "GetPart", "CommitWeights")
# What a disturbed server may answer; each says that the same request may be sent again.
DISTURBED = {
    "engine_failed",
    "unavailable",
    "storage_failed",
    "push_failed",
    "queue_full",
    "overloaded",
}
ALLOWED = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.PERMISSION_DENIED,  # parts of weights by http, which this server does not take
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.UNAVAILABLE,
}

Ask = Callable[[list[Any], dict[str, Any]], Awaitable[Sequence[Any]]]


class Plan(NamedTuple):
    requests: int  # half of them over gRPC
    kills: int
    pushes: int
    full_s: float  # seconds for which the disk is full


class Storm:
    """One shard: its load, its disturbances and what came of them."""

    def __init__(self, server: ServerProcess, plan: Plan, seed: int, disk: Path) -> None:
        self.server, self.plan, self.seed, self.disk = server, plan, seed, disk
        self.seen: Counter[str] = Counter()
        self.sent = 0
        self.reference: dict[str, Any] = {}
        self._done, self._ready = asyncio.Event(), asyncio.Event()
        self._ready.set()
        self._serial = itertools.count()

    async def run(self) -> None:
        async with (
            AsyncClient(self.server.url, timeout_s=ANSWER_S) as self._client,
            grpc.aio.insecure_channel(self.server.grpc_address) as self._channel,
        ):
            for body in SOUND:
                reply = await self._client.generate(body["requests"], sampling=body["sampling"])
                self.reference[json.dumps(body)] = [_bits(result) for result in reply.results]
            half = self.plan.requests // 2
            over_http, over_grpc = iter(range(half)), iter(range(self.plan.requests - half))
            asks = (self._over_http, self._over_grpc, self._as_rollout)
            async with asyncio.TaskGroup() as group:
                for work in (*map(self._be_sound, asks), self._kill(), self._push(), self._fill()):
                    group.create_task(work)
                load = [
                    *(group.create_task(self._attack(over_http)) for _ in range(ATTACKERS)),
                    *(group.create_task(self._call(over_grpc)) for _ in range(CALLERS)),
                ]
                await asyncio.gather(*load)
                self._done.set()

    async def _attack(self, left: Iterator[int]) -> None:
        """Send hostile requests over HTTP."""
        host, port = self.server.url.removeprefix("http://").split(":")
        for index in left:
            await self._ready.wait()
            asked = attempt(self.seed, index)
            try:
                received = await asyncio.wait_for(send((host, int(port)), asked), ANSWER_S)
                outcome = "disturbed" if _is_disturbed(received) else judge(asked, received)
            except Exception as error:
                raise AssertionError(
                    f"request {index} of seed {self.seed} ({asked.what}): "
                    f"{type(error).__name__}: {error}"
                ) from error
            self.seen[f"http {outcome}"] += 1
            self.sent += 1

    async def _call(self, left: Iterator[int]) -> None:
        """Send sound and damaged messages over gRPC."""
        for index in left:
            await self._ready.wait()
            method, message = _message(self.seed, index)
            call = self._channel.unary_unary(SERVICE + method)
            try:
                await call(message, timeout=ANSWER_S)
                code, details = grpc.StatusCode.OK, ""
            except grpc.aio.AioRpcError as error:
                code, details = error.code(), error.details() or ""
            where = f"message {index} of seed {self.seed} ({method}): {code} {details[:400]}"
            engine_gone = code is grpc.StatusCode.INTERNAL and "engine" in details
            assert code in ALLOWED or engine_gone, where
            assert "Traceback" not in details and len(details) < 5000, where
            self.seen[f"grpc {code.name.lower()}"] += 1
            self.sent += 1

    async def _be_sound(self, ask: Ask) -> None:
        """Send sound batches in one way, and compare what completes.

        Each has a stop string of its own that never comes, so that no request runs at two deaths of
        an engine, which would make it a suspect.
        """
        for body in itertools.cycle(SOUND):
            if self._done.is_set():
                return
            await self._ready.wait()
            sampling = {**body["sampling"], "stop": [f"<{next(self._serial)}>"]}
            results = await ask(body["requests"], sampling)
            for result, expected in zip(results, self.reference[json.dumps(body)], strict=False):
                error = result.error.code if result.error else ""
                assert error in DISTURBED or not error, result
                assert error or _bits(result) == expected, (body, result, expected)
                self.seen[f"sound {ask.__name__}{': disturbed' if error else ''}"] += 1
            if not results:
                self.seen[f"sound {ask.__name__}: refused"] += 1
                await asyncio.sleep(0.05)

    async def _over_http(self, items: list[Any], sampling: dict[str, Any]) -> Sequence[Any]:
        try:
            return (await self._client.generate(items, sampling=sampling)).results
        except ServerError as error:
            assert error.code in DISTURBED, error
            return []

    async def _as_rollout(self, items: list[Any], sampling: dict[str, Any]) -> Sequence[Any]:
        try:
            rollout = await self._client.generate(
                items, sampling=sampling, detach=True, idempotency_key=sampling["stop"][0]
            )
            return (await rollout.result()).results
        except ServerError as error:
            assert error.code in DISTURBED, error
            return []

    async def _over_grpc(self, items: list[Any], sampling: dict[str, Any]) -> Sequence[Any]:
        asked = json_format.ParseDict({"requests": items, "sampling": sampling}, GenerateRequest())
        stub = RolloutServiceStub(self._channel)
        try:
            return (await stub.GenerateBatch(asked, timeout=ANSWER_S)).results
        except grpc.aio.AioRpcError as error:
            assert error.code() in ALLOWED, error
            return []

    async def _paced(self, count: int) -> AsyncIterator[int]:
        """Yield 0 to count - 1, spread over the requests."""
        for i in range(count):
            due = self.plan.requests * (i + 1) / (count + 1)
            await _until(lambda: self._done.is_set() or self.sent >= due)  # noqa: B023
            yield i

    async def _kill(self) -> None:
        """Kill engines under load; what comes next waits for the engine that follows."""
        async for _ in self._paced(self.plan.kills):
            pid = engine(self.server.process.pid)
            os.kill(pid, signal.SIGKILL)
            self._ready.clear()
            await _until(lambda: engines(self.server.process.pid) not in ([pid], []))  # noqa: B023
            while not await self._client.is_ready():  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            self._ready.set()
            self.seen["kill"] += 1

    async def _push(self) -> None:
        """Push the target again, or one of two drafters, until each push was taken."""
        async for i in self._paced(self.plan.pushes):
            role, path = (
                ("target", "target"),
                ("drafter", "worse"),
                ("target", "target"),
                ("drafter", "drafter"),
            )[i % 4]
            for again in itertools.count():
                try:
                    await self._client.update_weights(path, f"push-{i}-{again}", role=role)
                    break
                except ServerError as error:
                    assert error.code in DISTURBED | {"conflict"}, error
                    assert again < 3000, f"push {i} never succeeds: {error}"
                    self.seen[f"push {error.code}"] += 1
                    await asyncio.sleep(0.1)
            self.seen["push"] += 1

    async def _fill(self) -> None:
        """Fill the disk of the state directory, in ten spells."""
        spells = 10 if self.plan.full_s else 0
        async for _ in self._paced(spells):
            with (self.disk / "filler").open("wb", buffering=0) as filler:
                with contextlib.suppress(OSError):
                    while True:
                        filler.write(bytes(2**16))
                with contextlib.suppress(OSError):
                    while True:
                        filler.write(b"0")
            await asyncio.sleep(self.plan.full_s / spells)
            (self.disk / "filler").unlink()
            self.seen["full"] += 1


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(ANSWER_S * 10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def _is_disturbed(received: bytes) -> bool:
    """Say whether a reply is an error that only a disturbance explains."""
    received = received.removeprefix(CONTINUE)
    head = received[:12].split(b" ")
    if len(head) < 2 or not head[1].startswith(b"5"):
        return False
    body = Answer(received, head_only=False).body
    gone = b"the engine process was ended by SIGKILL" in body  # a dialect without codes
    return gone or any(f'"{code}"'.encode() in body for code in DISTURBED)


def _message(seed: int, index: int) -> tuple[str, bytes]:
    """Return a method and the bytes that it gets: index `index` of a seed is always the same."""
    rng = random.Random(f"grpc:{seed}:{index}")
    body = {name: value for name, value in generate(rng).items() if name != "stream"}
    body.pop("detach", None)
    message = bytearray(json_format.ParseDict(body, GenerateRequest()).SerializeToString())
    kind = rng.random()
    if kind < 0.3:
        return "GenerateBatch", bytes(message)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(message) + 1)
        change = rng.randrange(4)
        if change == 0:
            message[at : at + rng.randint(1, 8)] = b""
        elif change == 1:
            message[at:at] = rng.randbytes(rng.randint(1, 8))
        elif change == 2 and at < len(message):
            message[at] ^= 1 << rng.randrange(8)
        else:
            message[at:at] = message[: rng.randint(1, len(message) or 1)]
    return ("GenerateBatch" if kind < 0.8 else rng.choice(UNARY)), bytes(message)


def _bits(result: Any) -> list[Any]:
    return [
        ([*choice.token_ids], [*choice.logprobs], choice.text, choice.finish_reason)
        for choice in result.choices
    ]


@contextlib.contextmanager
def small_disk(path: Path) -> Iterator[Path]:
    """Make a file system of `DISK_MB` that can be filled; it takes the right to mount."""
    path.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m,mode=700", "tmpfs", str(path)], check=True
    )
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def endure(plan: Plan, seed: int, root: Path, disk: Path) -> Counter[str]:
    for name, source in (("target", TARGET), ("drafter", DRAFTER)):
        shutil.copytree(source, root / name)
    perturbed_copy(DRAFTER, root / "worse")
    shutil.copy(DRAFTER / CALIBRATION, root / "worse")  # it must stay in bounds
    flags = [*LIMITS, *AT_ONCE, "--grpc-port", 0, "--weight-root", root, "--state-dir", disk]
    with ServerProcess(*PAIR, *map(str, flags)) as server, Client(server.url, timeout_s=60) as one:
        free = free_pages(one)
        storm = Storm(server, plan, seed, disk)
        uvloop.run(storm.run())
        seen = storm.seen
        until(one.is_ready)
        assert storm.sent == plan.requests, seen
        for way in ("_over_http", "_over_grpc", "_as_rollout"):
            assert seen[f"sound {way}"] > plan.requests / 1000, seen
        assert seen["kill"] == plan.kills and seen["push"] == plan.pushes, seen
        until(lambda: not look(one).open and free_pages(one) == free)
        for body in SOUND:
            reply = one.generate(body["requests"], sampling=body["sampling"])
            assert [_bits(result) for result in reply.results] == storm.reference[json.dumps(body)]
        assert server.stop() == 0
    said = "\n".join(server.lines)
    assert "unexpected_error" not in said and "Traceback" not in said and SECRET not in said, said[
        -4000:
    ]
    print(dict(sorted(seen.items())), file=sys.stderr)
    return seen


@pytest.mark.long
def test_server_survives_a_small_storm_of_requests(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "disk").mkdir()
    endure(Plan(400, 1, 4, 0), 0, tmp_path / "root", tmp_path / "disk")


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("seed", range(1, 25))
def test_server_survives_a_million_requests(
    seed: int, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    (tmp_path / "root").mkdir()
    with small_disk(tmp_path / "disk") as disk:
        seen = endure(Plan(41_700, 5, 42, 25), seed, tmp_path / "root", disk)
    record_property("counted", json.dumps(seen))  # `benchmarks.record` reads it
    assert seen["full"] == 10, seen
