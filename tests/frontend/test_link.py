"""The link of a gateway: the outputs are those of the server itself, commands are answered, deaths
are told, and what a broken stream leaves is aborted.
"""

import asyncio
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import structlog

from tests.frontend.fake_engine import DIES, HANGS, INFO
from tests.frontend.gateways import attached, happens, on_link, request
from tests.frontend.live_server import LiveServer
from tlt_server.frontend.dialects import DIALECTS
from tlt_server.frontend.rpc import relay
from tlt_server.wire.commands import (
    Abort,
    ClearCache,
    CommitWeights,
    LookAtWeights,
    Manifest,
    Pause,
    PushWeights,
    Resume,
    SetPolicy,
    Sleep,
    Stop,
    Submit,
    WakeUp,
)
from tlt_server.wire.events import Outputs, Phase, Ready
from tlt_server.wire.link import LinkEvent
from tlt_server.wire.records import Sampling, StepOutput

HUNG = [65, HANGS]  # the fake engine never gives a token of it


def whole(outputs: Iterable[StepOutput]) -> dict[str, Any]:
    """Return all that the outputs of a sequence say, however they were cut."""
    outputs = [*outputs]
    found: dict[str, Any] = {
        name: [value for output in outputs for value in getattr(output, name) or ()]
        for name in ("token_ids", "logprobs", "raw_logprobs", "top_logprobs", "accepted_each")
    }
    for name in ("drafted", "accepted", "steps", "cached_tokens", "draft_tokens"):
        found[name] = sum(getattr(output, name) for output in outputs)
    last = outputs[-1]
    ends = last.finish_reason, last.stop_reason, last.error, {o.weight_version for o in outputs}
    return found | {"ends": ends, "scores": outputs[0].prompt_logprobs}


@on_link()
async def test_batch_over_a_link_gives_the_servers_own_outputs(server: LiveServer) -> None:
    sampling = Sampling(max_tokens=40, logprobs=1, prompt_logprobs=1)
    batch = [
        *(request(f"a{at}", [at + 65, 70, 71], 5 + at, patient=at % 2 == 0) for at in range(8)),
        request("scored", [65, 66, 67], sampling=sampling),
        request("continued", [65, 66, 67], 9, generated=[65, 66, 67, 65]),
        request("read", [65, 66], 0),
    ]
    own: dict[str, list[StepOutput]] = {}
    submission = server.client.submit(batch)
    async for few, _ in submission.slices(lambda output: 1, 1):
        for output in few:
            own.setdefault(output.id, []).append(output)
    async with attached(server) as gateway:
        gateway.submit(*batch)
        await happens(lambda: gateway.ended(*own))
        assert {id: whole(outputs) for id, outputs in gateway.outputs.items()} == {
            id: whole(outputs) for id, outputs in own.items()
        }
        figures = [event for event in gateway.of(Outputs) if event.cycle is not None]
        emitted = sum(event.cycle.emitted for event in figures)
        assert emitted and sum(event.cycle.drafted for event in figures) == 3 * emitted
        assert figures[-1].gauges["pages_free"] == 60.0
        assert server.client.open_ids == []


@on_link()
async def test_deadlines_reach_the_engine_by_its_own_clock(server: LiveServer) -> None:
    async with attached(server) as gateway:
        now_s = time.monotonic()
        gateway.submit(request("a", HUNG, deadline_s=now_s + 500, begin_by_s=now_s + 100))
        await happens(lambda: server.engine.submitted)
        [found] = server.engine.submitted
        assert found.deadline_s is not None and found.begin_by_s is not None
        assert 0 <= found.deadline_s - (now_s + 500) < 60  # the time of the way is added
        assert found.deadline_s - found.begin_by_s == pytest.approx(400)


@on_link()
async def test_sequences_over_a_link_count_to_their_own_keys(server: LiveServer) -> None:
    async with attached(server) as gateway:
        gateway.submit(*(request(id, HUNG, owner=id[0]) for id in ("a1", "b1", "a2")))
        await happens(lambda: len(server.engine.running) == 3)
        counts = server.client.admission._held.items()
        assert {owner: held.sequences for owner, held in counts} == {"a": 2, "b": 1}


@on_link()
async def test_abort_over_a_link_ends_only_what_it_names(server: LiveServer) -> None:
    own = server.client.submit([request("a", HUNG)])
    async with attached(server) as gateway:
        gateway.submit(*(request(id, HUNG) for id in "abc"))
        await happens(lambda: len(server.engine.running) == 4)
        gateway.link.send(Abort(["a", "unknown"], "stop"))
        await happens(lambda: gateway.ended("a"))
        assert gateway.outputs["a"][-1].finish_reason == "stop"
        assert len(server.engine.running) == 3 and own.open == {"a"}
        gateway.link.send(Abort([], all=True))
        await happens(lambda: gateway.ended("b", "c"))
        assert [*server.engine.running] == ["a"] and own.open == {"a"}
        assert server.client.activity._busy
        server.client.abort(["a"])
        await happens(lambda: not own.open)
        assert not server.client.activity._busy, "its trainer would not begin"


@on_link()
async def test_gateways_pushes_wait_for_the_servers_own_adoption(server: LiveServer) -> None:
    async with attached(server) as gateway:
        async with server.client.adopting:
            push = asyncio.create_task(gateway.ask(PushWeights("p", Manifest(version="v8"))))
            other = asyncio.create_task(gateway.ask(CommitWeights("c", version="v8")))
            await happens(lambda: len(server.client.adopting._waiters or ()) == 2)  # type: ignore[attr-defined]
            assert not push.done() and not other.done()
        assert (await push).version == (await other).version == "v8"


@on_link()
async def test_commands_over_a_link_are_answered_by_their_own_ids(server: LiveServer) -> None:
    async with attached(server) as gateway:
        pushed = await gateway.ask(PushWeights("p", Manifest(version="v7", commit=False)))
        assert (pushed.result, pushed.version, pushed.error) == ("staged", "v7", None)
        committed = await gateway.ask(CommitWeights("c", version="v7"))
        assert committed.state.target == "v7" == server.client.info.weight_version  # type: ignore[union-attr]
        refused = await gateway.ask(PushWeights("q", Manifest(path="conflict")))
        assert refused.error == ("conflict", "conflict: out of luck")
        for command in (
            Pause("c1", clear_cache=True),
            Resume("c2"),
            Sleep("c3", ["weights"]),
            WakeUp("c4", ["weights"]),
            ClearCache("c5"),
        ):
            report = await gateway.ask(command)
            assert report.error is None
        assert [type(each).__name__ for each in server.engine.controls] == [
            *("Pause", "Resume", "Sleep", "WakeUp", "ClearCache")
        ]
        report = await gateway.ask(SetPolicy("off", id="c6"))
        assert report.error is None and report.detail == "off is prepared"
        gateway.submit(request("a", HUNG))
        await happens(lambda: server.engine.running)
        [running] = server.engine.running.values()
        await happens(lambda: running.held)
        report = await gateway.ask(ClearCache("c7", unless_held=True))
        assert report.error == ("conflict", "sequences run")
        assert not gateway.link.send(Stop()), "a gateway does not stop a server"


@on_link()
async def test_only_changes_by_a_gateway_are_audited(server: LiveServer) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(relay, "log", log := structlog.testing.CapturingLogger())
        async with attached(server) as gateway:
            await gateway.ask(LookAtWeights("l"))
            await gateway.ask(Pause("p"))
    audits = [call.kwargs for call in log.calls if call.args == ("audit",)]
    assert [each["command"] for each in audits] == ["Pause"]


@on_link()
async def test_submission_waits_in_a_server_that_its_gateway_paused(server: LiveServer) -> None:
    async with attached(server) as gateway:
        await gateway.ask(Sleep("s", ["weights", "kv_cache"]))
        gateway.submit(request("a", [65], 3))
        await happens(lambda: server.engine.submitted)
        assert not gateway.outputs
        await gateway.ask(WakeUp("w", ["weights", "kv_cache"]))
        await happens(lambda: gateway.ended("a"))
        assert gateway.outputs["a"][-1].finish_reason == "length"


@on_link()
async def test_next_gateway_finds_no_pause_or_sleep_of_the_one_before(server: LiveServer) -> None:
    async with attached(server) as gateway:
        await gateway.ask(Pause("p"))
        await gateway.ask(Sleep("s", ["kv_cache"]))
    async with attached(server) as gateway:
        assert not server.engine.paused and not server.engine.asleep
        assert gateway.of(Ready)[0].info.weight_version == "v0"
        assert not server.engine.weight_commands, "an open push is the gateway's to end"


@on_link(max_restarts=100, restart_window_s=1.0)
async def test_engine_death_is_told_with_what_ran(server: LiveServer) -> None:
    own = server.client.submit([request("own", HUNG)])
    async with attached(server) as gateway:
        gateway.submit(request("a", HUNG), request("b", HUNG))
        await happens(lambda: len(server.engine.running) == 3)
        server.may_launch.clear()
        gateway.submit(request("killer", [65, DIES]))
        await happens(lambda: gateway.deaths)
        [(death, restart_in_s)] = gateway.deaths
        assert death.ending == "exited" and restart_in_s is not None
        assert death.started == {"a", "b", "killer", ""}, "of direct clients no id is told"
        assert death.error.code == "engine_failed" and "status 7" in death.error.message
        assert not gateway.link.send(Submit([request("late", [65])])), "there is no engine"
        assert not any(gateway.outputs.values()), "the gateway goes on with what ran"
        await happens(lambda: server.client.relay is not None)
        server.may_launch.set()
        await gateway.ready(times=2)
        assert gateway.of(Phase)[-1].name == "load", "the start is told too"
        gateway.submit(request("a", [65], 3))
        await happens(lambda: gateway.ended("a"))
        assert len(gateway.deaths) == 1 and not own.open


@on_link()
async def test_broken_stream_aborts_its_sequences_only(server: LiveServer) -> None:
    own = server.client.submit([request("own", HUNG)])
    async with attached(server) as gateway:
        gateway.submit(request("a", HUNG), request("b", HUNG))
        await happens(lambda: len(server.engine.running) == 3)
    await happens(lambda: len(server.engine.running) == 1)
    await happens(lambda: server.client.open_ids == ["own"])
    assert own.open and len(server.engine.aborted) == 2
    async with attached(server, epoch=2) as gateway:
        gateway.submit(request("a", [65], 3))
        await happens(lambda: gateway.ended("a"))
        assert gateway.outputs["a"][-1].finish_reason == "length", "late outputs meet no new ids"


def test_outputs_are_gathered_unless_a_client_waits_or_one_ends(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages, encoded = [0], relay.event_messages

    def counted(events: list[LinkEvent]) -> Iterable[bytes]:
        messages[-1] += 1
        return encoded(events)

    monkeypatch.setattr(relay, "GATHER_S", 60)  # an end does not wait for it
    monkeypatch.setattr(relay, "event_messages", counted)

    @on_link(engine={"step_s": 0.001, "per_step": 1})
    async def story(server: LiveServer) -> None:
        async with attached(server) as gateway:
            for patient in (True, False):
                messages.append(0)
                gateway.submit(request(f"{patient}", [65, 66], 100, patient=patient))
                await happens(lambda: gateway.ended(f"{patient}"))  # noqa: B023
            assert messages[2] > 2 * messages[1]

    story(model=model)


@on_link(engine={"step_s": 0.001, "per_step": 1})
async def test_outputs_of_a_step_are_one_event(server: LiveServer) -> None:
    async with attached(server) as gateway:
        ids = [f"{at}" for at in range(32)]
        for id in ids:
            gateway.submit(request(id, [65, 66], 100, patient=False))
        await happens(lambda: gateway.ended(*ids))
        events = sum(bool(event.outputs) for event in gateway.of(Outputs))
        assert events < sum(len(outputs) for outputs in gateway.outputs.values()) / 4


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"token_ids": [INFO.vocab_size]}, "invalid_request"),
        ({"token_ids": [-1]}, "invalid_request"),
        ({"token_ids": [2**40]}, "invalid_request"),
        ({"token_ids": []}, "invalid_request"),
        ({"generated": [INFO.vocab_size]}, "invalid_request"),
        ({"sampling": Sampling(max_tokens=INFO.max_model_len)}, "invalid_request"),
        ({"id": "a\nb"}, "invalid_request"),
        ({"id": "a" * 300}, "invalid_request"),
    ],
)
def test_request_that_the_model_cannot_run_ends_alone(
    model: Any, fields: dict[str, Any], code: str
) -> None:
    @on_link()
    async def story(server: LiveServer) -> None:
        async with attached(server) as gateway:
            bad = msgspec.structs.replace(request("bad", [65]), **fields)
            gateway.submit(bad, request("good", [65], 3))
            await happens(lambda: gateway.ended(bad.id, "good"))
            error = gateway.outputs[bad.id][-1].error
            assert error is not None and error[0] == code
            assert gateway.outputs["good"][-1].finish_reason == "length"
            assert [each.token_ids for each in server.engine.submitted] == [[65]]

    story(model=model)


@on_link()
async def test_own_routes_that_command_are_409_while_attached(server: LiveServer) -> None:
    routes = [route for name in DIALECTS for route in DIALECTS.resolve(name)]
    refused = [route for route in routes if route.commands]
    paths = {route.path for route in refused}
    assert len(refused) > 50 and paths > {
        *("/update_weights", "/weights/rollback", "/weights/{version}/commit", "/pause"),
        *("/engine/sleep", "/pause_generation", "/release_memory_occupation", "/strategy"),
        *("/areal_update_weights", "/v1/load_lora_adapter", "/update_weights_from_disk"),
    }
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:

        async def status(method: str, path: str, body: Any = None) -> int:
            reply = await client.request(method, re.sub(r"{\w+}", "x", path), json=body)
            assert reply.status_code != 409 or "http://g:8000 of the fleet f" in reply.text
            assert reply.status_code in (200, 409), reply.text
            return reply.status_code

        async with attached(server):
            assert {await status(route.method, route.path) for route in refused} == {409}
            assert not server.engine.weight_commands and not server.engine.controls
            generate = {"requests": [{"token_ids": [65], "sampling": {"max_tokens": 2}}]}
            for method, path, body in (
                ("POST", "/generate", generate),
                ("GET", "/weights", None),
                ("GET", "/strategy", None),
                ("POST", "/engine/abort", {"ids": ["a"]}),
            ):
                assert await status(method, path, body) == 200, path
        await happens(lambda: server.client.relay is None)
        assert (
            await status("POST", "/engine/pause") == await status("POST", "/engine/resume") == 200
        )
