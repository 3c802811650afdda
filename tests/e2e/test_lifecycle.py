"""A server's end, and its requests': clients that leave, an engine that dies, SIGTERM, model
directories that cannot be used.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import load_file, save_file

from tests.e2e.conftest import PAIR
from tests.mostly_long import mostly_long
from tests.processes import engine
from tests.waiting import until
from tlt_client import Client, ServerError
from tlt_client.wire import Token
from tlt_server.demo.rounds import look
from tlt_server.demo.server import ServerProcess
from tlt_server.demo.workload import DRAFTER, TARGET
from tlt_server.errors import StartupError

QUESTION = [{"role": "user", "content": "Use 3,7,11 to make 300."}]
LONG = {"max_tokens": 3000, "ignore_eos": True}
SHORTER = {**LONG, "max_tokens": 400}
FAST_START = ("--model", str(TARGET), "--drafter", "none", "--kv-memory-mb", "64")


def gauge(client: Client, name: str) -> float:
    return next(
        s.value
        for family in text_string_to_metric_families(client.metrics())
        for s in family.samples
        if s.name == name
    )


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_pages_at_once(
    client: Client, server: ServerProcess, stream: bool
) -> None:
    client.set_strategy("beg")
    until(lambda: look(client).open == 0)
    free = gauge(client, "tlt_pages_free")
    body = {"requests": [{"messages": QUESTION, "n": 4}], "sampling": LONG, "stream": stream}
    with httpx.Client(timeout=httpx.Timeout(60, read=60 if stream else 1.5)) as leaving:
        if stream:
            with leaving.stream("POST", f"{server.url}/generate", json=body) as response:
                lines = response.iter_lines()
                next(lines)
                assert gauge(client, "tlt_pages_free") < free and look(client).open == 4
        else:
            with pytest.raises(httpx.ReadTimeout):
                leaving.post(f"{server.url}/generate", json=body)
    passes = look(client).passes
    until(
        lambda: (
            look(client).open == look(client).running == 0
            and gauge(client, "tlt_pages_free") == free
        )
    )
    assert look(client).passes - passes < 300  # some thousand were left


@pytest.mark.long
def test_killing_the_engine_ends_every_open_request_with_one_typed_error() -> None:
    with (
        ServerProcess(*FAST_START, "--max-restarts", "0") as server,
        Client(server.url, timeout_s=60) as client,
    ):
        ended: list[Any] = []

        def ask() -> None:
            ended.append(
                client.generate(
                    [{"messages": QUESTION, "n": 2}, {"messages": QUESTION}], sampling=LONG
                )
            )

        waiting = threading.Thread(target=ask)
        waiting.start()
        events, errors = [], []
        with Client(server.url, timeout_s=60) as other:
            for event in other.stream(
                [{"id": "a", "messages": QUESTION}, {"id": "b", "messages": QUESTION, "n": 2}],
                sampling=LONG,
            ):
                if isinstance(event, Token) and not events:
                    until(lambda: look(client).open == 6)
                    os.kill(engine(server.process.pid), signal.SIGKILL)
                events.append(event)
                errors += [event.error] if getattr(event, "error", None) else []
        waiting.join(60)
        assert [error.code for error in errors] == ["engine_failed"] * 2 and errors[0].retryable
        assert [result.error.code for result in ended[0].results] == ["engine_failed"] * 2
        assert server.process.wait(60) == 1


def test_sigterm_lets_running_requests_finish_and_refuses_new_ones() -> None:
    with ServerProcess(*FAST_START) as server, Client(server.url, timeout_s=60) as client:
        replies: list[Any] = []
        running = threading.Thread(
            target=lambda: replies.append(
                client.generate([{"messages": QUESTION, "n": 2}], sampling=SHORTER)
            )
        )
        running.start()
        until(lambda: look(client).open == 2)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: not client.is_ready())
        with pytest.raises(ServerError) as refused:
            client.generate([{"messages": QUESTION}])
        assert (refused.value.code, refused.value.status, refused.value.retryable) == (
            "unavailable",
            503,
            True,
        )
        assert running.is_alive()
        running.join(60)
        assert [(c.finish_reason, len(c.token_ids)) for c in replies[0].results[0].choices] == [
            ("length", 400)
        ] * 2
        assert server.process.wait(60) == 0


def _without_config(model: Path) -> None:
    (model / "config.json").unlink()


def _truncated(model: Path) -> None:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4096])


BROKEN: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "no config": (_without_config, ("there is no", "config.json", "model must name a directory")),
    "truncated": (_truncated, ("model.safetensors", "truncated or damaged", "download it again")),
}


def starting_fails(*flags: str) -> str:
    with pytest.raises(StartupError, match="status 2") as caught, ServerProcess(*flags):
        pass
    return caught.value.message


@pytest.mark.parametrize("name", mostly_long(BROKEN, "no config"))
def test_a_broken_model_directory_is_named_at_start(name: str, tmp_path: Path) -> None:
    spoil, parts = BROKEN[name]
    model = Path(shutil.copytree(TARGET, tmp_path / "model"))
    spoil(model)
    message = starting_fails("--model", str(model), *FAST_START[2:])
    assert str(model) in message
    for part in parts:
        assert part in message


@pytest.mark.long
def test_a_drafter_of_the_wrong_kind_is_named_at_start(tmp_path: Path) -> None:
    message = starting_fails("--model", str(TARGET), "--drafter", str(TARGET))
    assert str(TARGET) in message and "are not those of a drafter" in message
    missing = str(tmp_path / "nothing")
    assert missing in starting_fails("--model", str(TARGET), "--drafter", missing)
    drafter = Path(shutil.copytree(DRAFTER, tmp_path / "drafter"))
    tensors = load_file(drafter / "model.safetensors")
    tensors["fc.weight"] = tensors["fc.weight"][:, :-8].clone()
    save_file(tensors, drafter / "model.safetensors")
    message = starting_fails("--model", str(TARGET), "--drafter", str(drafter))
    for part in ("fc.weight", "], expected [", "do not belong together"):
        assert part in message


def test_the_shipped_pair_is_what_the_fixture_serves(client: Client) -> None:
    engine = client.server_info()["engine"]
    assert engine["drafter"] == "eagle+history" and PAIR[1] == str(TARGET)
