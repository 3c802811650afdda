"""Messages of a server while its engine starts: the phase under way, how far it is, its lines."""

import io
from pathlib import Path

import httpx
import pytest

from tests.frontend.fake_engine import DIES
from tests.frontend.live_server import LiveServer, live_server
from tests.waiting import until
from tlt_client import Client
from tlt_server.errors import Unavailable
from tlt_server.frontend.http.logs import lasting
from tlt_server.frontend.link.admission import Admission
from tlt_server.frontend.link.client import EngineClient
from tlt_server.frontend.link.starting import REWRITE, ProgressLines, StartState, UnderWay
from tlt_server.metrics import Metrics
from tlt_server.wire.events import Phase, PhaseProgress

COMPILING = "compiling kernels, once per machine (3 of 22)"
COMMANDS = (
    *("/engine/abort", "/abort_request", "/abort_requests", "/inference/v1/abort_requests"),
    *("/begin_weight_update", "/start_weight_update", "/start_draft_weight_update"),
    *("/update_weights", "/update_weights_from_distributed", "/areal_update_weights_xccl"),
    *("/v1/load_lora_adapter",),
)


def test_phase_under_way_is_named_with_progress_and_time() -> None:
    now = 10.0
    start = StartState(lambda: now)
    assert str(start.under_way) == "launching the engine, for 0 s so far"
    start.take(PhaseProgress("load kernels", 0, 0))
    start.take(PhaseProgress("compile kernels", 0, 22))
    now = 22.0
    start.take(PhaseProgress("compile kernels", 3, 22))
    assert str(start.under_way) == f"{COMPILING}, for 12 s so far"
    start.take(Phase("load kernels", 12.0))
    start.take(PhaseProgress("load model", 0, 0))
    assert str(start.under_way) == "loading weights, for 0 s so far"
    start.ready()
    assert start.under_way is None and [phase.name for phase in start.phases] == ["load kernels"]


def test_requests_before_the_first_start_learn_the_phase() -> None:
    admission = Admission(max_queue=1, max_queue_tokens=1, max_page_forecast=1.0)
    client = EngineClient(admission, Metrics())
    client.take(PhaseProgress("compile kernels", 3, 22))
    for check in (client.check_available, client.check_running):
        with pytest.raises(Unavailable) as refused:
            check()
        assert f"the engine is starting; now {COMPILING}" in refused.value.message


def lose_engine(server: LiveServer) -> None:
    """Let the engine die, and none start before `may_launch` is set."""
    server.call(server.may_launch.clear)
    with Client(server.url, timeout_s=30) as client:
        client.generate([{"token_ids": [DIES]}])
    until(lambda: "launching the engine" in httpx.get(f"{server.url}/readyz").text)


def test_probes_and_requests_learn_the_phase_of_a_restart(model: Path) -> None:
    with live_server(model, max_restarts=100, restart_window_s=1.0) as server:
        assert httpx.get(f"{server.url}/startupz").json()["under_way"] is None
        lose_engine(server)
        for done in (0, 3):
            event = PhaseProgress("compile kernels", done, 22)
            server.call(lambda event=event: server.supervisor._take(event))
        asked = httpx.post(f"{server.url}/generate", json={"requests": [{"prompt": "a"}]})
        for response in (asked, httpx.get(f"{server.url}/readyz")):
            assert response.status_code == 503 and f"; now {COMPILING}" in response.text
        shown = httpx.get(f"{server.url}/startupz").json()["under_way"]
        assert (shown["phase"], shown["done"], shown["of"]) == (
            *("compiling kernels, once per machine", 3, 22),
        )
        assert "compiling kernels, once per machine (0 of 22)" in server.said.getvalue()
        server.call(server.may_launch.set)
        until(lambda: httpx.get(f"{server.url}/readyz").status_code == 200)


def test_commands_without_an_engine_get_503_before_400(model: Path) -> None:
    with live_server(model, max_restarts=100, restart_window_s=1.0) as server:
        assert {httpx.post(server.url + path, content="[").status_code for path in COMMANDS} == {
            400
        }
        lose_engine(server)
        for path in COMMANDS:
            answer = httpx.post(server.url + path, content="[")
            assert answer.status_code == 503 and "the engine" in answer.text, path
        server.call(server.may_launch.set)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Unread(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError

    def flush(self) -> None:
        raise OSError(28, "No space left on device")


def under_way(done: int, of: int = 57, seconds: float = 0.0) -> UnderWay:
    return UnderWay("capturing graphs", done, of, seconds)


def test_terminal_progress_overwrites_one_line() -> None:
    stream = Terminal()
    progress = ProgressLines(stream, clock=lambda: 0.0)
    for done in (1, 2):
        progress.under_way(under_way(done))
    progress.phase(Phase("prepare runner", 9.5, "57 graphs"))
    first, second, third = stream.getvalue().split(REWRITE)[1:]
    assert "capturing graphs (1 of 57)" in first and "\n" not in first + second
    assert third.endswith("57 graphs\n")
    progress.listening("http://x")
    assert stream.getvalue().count(REWRITE) == 3


def test_without_a_terminal_progress_is_one_line_per_ten_seconds() -> None:
    stream, now = io.StringIO(), 0.0
    progress = ProgressLines(stream, clock=lambda: now)
    for second in range(26):
        progress.under_way(under_way(second // 3, seconds=now))
        now += 1.0
    said = [line.split("(")[1].split()[0] for line in stream.getvalue().splitlines()]
    assert said == ["0", "3", "6"]


def test_phase_without_steps_is_printed_every_ten_seconds() -> None:
    stream, now = io.StringIO(), 0.0
    progress = ProgressLines(stream, clock=lambda: now)
    for _ in range(26):
        progress.under_way(UnderWay("loading weights", 0, 0, now))
        now += 1.0
    assert stream.getvalue().splitlines() == [
        f"  loading weights, for {seconds} s so far ..." for seconds in (10, 20)
    ]


def test_unwritable_progress_stream_does_not_stop_the_start() -> None:
    stream = Unread()
    ProgressLines(stream).draining(3, 10.0)
    lasting(stream).flush()
    assert not lasting(stream).isatty() and lasting(Terminal()).isatty()
    with pytest.raises(BrokenPipeError):
        print("line", file=stream)
