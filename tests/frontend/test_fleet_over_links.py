"""A fleet of three servers over real links: its outputs are those of one server, whichever of them
die, and a push is live on all.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.frontend.gateways import happens, request
from tests.frontend.live_server import LiveServer, live_server
from tests.unit.small_fleet import NoPushes, read
from tests.waiting import in_loop_with
from tlt_server.frontend.link.admission import Admission
from tlt_server.frontend.link.fleet import Fleet
from tlt_server.frontend.link.fleet_file import FleetFile
from tlt_server.frontend.link.launching import ReplicaAddress
from tlt_server.frontend.link.members import Member
from tlt_server.frontend.link.remote import RemoteLink
from tlt_server.metrics import Metrics
from tlt_server.wire.commands import Pause, Resume
from tlt_server.wire.link import Attach
from tlt_server.wire.records import StepOutput

SLOW = {"step_s": 0.002, "per_step": 2}
OFTEN = {"max_restarts": 100, "restart_window_s": 1.0}


class LinkedFleet:
    """A gateway's engine client and fleet, over these servers."""

    def __init__(self, servers: Sequence[LiveServer]) -> None:
        admission = Admission(max_queue=10**6, max_queue_tokens=10**9, max_page_forecast=1e9)
        self.servers = servers
        with TemporaryDirectory() as state_dir:
            file = FleetFile(Path(state_dir))
        self.fleet = Fleet(admission, Metrics(), self, self._connect, file, url="http://g:8000")
        self.client = self.fleet.client
        self.fleet.fan_out = NoPushes(self.fleet)  # type: ignore[assignment]

    async def _connect(self, fleet: Fleet, member: Member) -> None:
        attach = Attach(fleet="f", epoch=1, gateway="http://g:8000")
        await RemoteLink(member.address.link, lambda: attach, fleet, member).run()

    async def run(self, found: Callable[[Sequence[ReplicaAddress]], None]) -> None:
        found([ReplicaAddress(f"r{i}", each.link_address) for i, each in enumerate(self.servers)])
        await asyncio.Event().wait()

    def check(self, more: int = 0) -> None:
        """Everything is possible."""

    async def start(self) -> str:
        raise NotImplementedError

    async def stop(self, name: str) -> None:
        raise NotImplementedError

    async def restart(self, name: str) -> None:
        raise NotImplementedError

    @property
    def states(self) -> list[str]:
        return [member.state for member in self.fleet.members.values()]


@contextmanager
def servers(model: Path) -> Iterator[dict[str, Any]]:
    with ExitStack() as stack:
        yield {
            "servers": [
                stack.enter_context(live_server(model, link_port=0, engine=SLOW, **OFTEN))
                for _ in range(3)
            ]
        }


def joined(outputs: list[StepOutput]) -> dict[str, Any]:
    last = outputs[-1]
    return {
        "tokens": [token for output in outputs for token in output.token_ids],
        "logprobs": [value for output in outputs for value in output.logprobs],
        "ends": [output.finish_reason for output in outputs if output.finish_reason],
        "error": last.error,
    }


@in_loop_with(servers, "servers")
async def test_sequences_of_lost_replicas_end_as_on_one_server(servers: list[LiveServer]) -> None:
    fleet = LinkedFleet(servers)
    running = asyncio.create_task(fleet.fleet.run())
    try:
        await happens(lambda: fleet.states == ["ready"] * 3)
        batch = [request(f"{at}-0.0", [65, 66 + at, 70], 200 + at) for at in range(24)]
        submission = fleet.client.submit(batch)
        await happens(lambda: all(server.engine.running for server in servers))
        servers[0].engine.dies = True  # the engine
        await happens(lambda: "ready" in fleet.states and fleet.states[0] != "ready")
        await asyncio.to_thread(servers[1].call, lambda: servers[1].client._stop_taking())
        found = await read(submission)
        assert len(found) == len(batch)
        for each in batch:
            tokens = [[65, each.token_ids[1], 70][i % 3] for i in range(each.sampling.max_tokens)]
            assert joined(found[each.id]) == {
                "tokens": tokens,
                "logprobs": [-0.5] * len(tokens),
                "ends": ["length"],
                "error": None,
            }
        await happens(lambda: fleet.states[0] == "ready")
    finally:
        running.cancel()
        await asyncio.wait({running})


@in_loop_with(servers, "servers")
async def test_pause_of_a_fleet_reaches_every_server(servers: list[LiveServer]) -> None:
    fleet = LinkedFleet(servers)
    running = asyncio.create_task(fleet.fleet.run())
    try:
        await happens(lambda: fleet.states == ["ready"] * 3)
        await fleet.client.pauses.pause("continue", refuse=False, clear_cache=False)
        assert all(server.engine.paused for server in servers)
        assert {type(each) for server in servers for each in server.engine.controls} == {Pause}
        await fleet.client.pauses.resume()
        assert {type(server.engine.controls[-1]) for server in servers} == {Resume}
    finally:
        running.cancel()
        await asyncio.wait({running})
