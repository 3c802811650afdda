"""Log lines: one form for ours and the libraries', the request's id in each, and never a prompt, a
completion or a key.
"""

import asyncio
import io
import json
import logging
import re
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import structlog

from tests.frontend.fake_engine import DIES, FAILS
from tests.frontend.live_server import LiveServer, live_server, serving
from tests.waiting import in_loop, until
from tlt_server.frontend.http.logs import left_behind, write_logs

PROMPT, COMPLETION, KEY = (
    "canaryprompt",
    "yrpanac",
    "canarykey",
)  # the fake engine echoes the prompt


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """All that is logged, at debug level, as JSON."""
    before, handlers = structlog.get_config(), logging.getLogger().handlers[:]
    stream = io.StringIO()
    write_logs("debug", "json", stream)
    structlog.configure(cache_logger_on_first_use=False)
    yield stream
    structlog.configure(**before)
    logging.basicConfig(level=logging.WARNING, handlers=handlers, force=True)


keyed = serving(scope="function", keys=KEY, body_timeout_s=1.0)


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def accesses(stream: io.StringIO, count: int) -> list[dict[str, Any]]:
    """Wait for `count` access lines: each is written after its reply, so a client may be ahead."""

    def requests() -> list[dict[str, Any]]:
        return [line for line in lines(stream) if line["event"] == "request"]

    until(lambda: len(requests()) >= count)
    found = requests()
    assert len(found) == count
    return found


def ask(server: LiveServer, body: Any, path: str = "/generate", **headers: str) -> httpx.Response:
    content = body if isinstance(body, str) else json.dumps(body)
    return httpx.post(
        f"{server.url}{path}",
        content=content,
        headers={"authorization": f"Bearer {KEY}", **headers},
        timeout=30,
    )


def test_request_has_one_access_line_and_its_id_in_all_lines(
    keyed: LiveServer, stream: io.StringIO
) -> None:
    body = {"requests": [{"prompt": PROMPT}], "sampling": {"max_tokens": 4}}
    reply = ask(keyed, body, "/generate?who=canaryquery", **{"x-request-id": "step-7.a"})
    assert reply.headers["x-request-id"] == "step-7.a"
    (access,) = accesses(stream, 1)
    assert (access["method"], access["route"], access["status"]) == ("POST", "/generate", 200)
    assert (access["client"], access["level"]) == ("127.0.0.1", "info")
    assert access["request_bytes"] == len(reply.request.content)
    assert access["response_bytes"] == len(reply.content)
    assert 0 < access["seconds"] < 30 and access["timestamp"].endswith("Z")
    (generated,) = [line for line in lines(stream) if line["event"] == "generated"]
    assert generated["request_id"] == access["request_id"] == "step-7.a"


def test_a_malformed_request_id_is_replaced(keyed: LiveServer, stream: io.StringIO) -> None:
    ids = []
    for given in ("", "a b", "x" * 129, "caf\u00e9", 'a"b', None):
        headers = {} if given is None else {"x-request-id": given.encode("latin-1")}
        for _ in range(3):
            reply = httpx.get(f"{keyed.url}/livez", headers=headers)
            ids.append(reply.headers["x-request-id"])
    assert len({*ids}) == len(ids) and all(re.fullmatch("[0-9a-f]{16}", id) for id in ids)
    assert {*ids} == {line["request_id"] for line in accesses(stream, len(ids))}


ACCESSES = [  # method, path, status, the line's route and level
    ("GET", "/livez", 200, "/livez", "debug"),
    ("GET", "/metrics", 401, "/metrics", "warning"),
    ("GET", "/strategy", 401, "/strategy", "warning"),
    ("PURGE", "/livez", 405, "/livez", "warning"),
    ("GET", "/canarypath", 401, "none", "warning"),
    ("POST", "/weights/canaryversion/commit", 401, "/weights/{version}/commit", "warning"),
    ("PURGE", "/generate", 401, "/generate", "warning"),
]


def test_access_lines_name_route_status_and_level(keyed: LiveServer, stream: io.StringIO) -> None:
    for method, path, status, _, _ in ACCESSES:
        reply = httpx.request(method, f"{keyed.url}{path}")
        assert reply.status_code == status and reply.headers["x-request-id"]
    found = accesses(stream, len(ACCESSES))
    assert sorted((line["route"], line["status"], line["level"]) for line in found) == sorted(
        (route, status, level) for _, _, status, route, level in ACCESSES
    )
    assert "canary" not in stream.getvalue().lower()


def test_polled_routes_are_quiet_even_when_a_probe_fails(
    keyed: LiveServer, stream: io.StringIO
) -> None:
    keyed.call(lambda: setattr(keyed.client, "draining", True))
    asked = {"/metrics": 200, "/server_info": 200, "/strategy": 503, "/readyz": 503, "/livez": 200}
    for path, status in asked.items():
        assert (
            httpx.get(f"{keyed.url}{path}", headers={"authorization": f"Bearer {KEY}"}).status_code
            == status
        )
    levels = {line["route"]: line["level"] for line in accesses(stream, len(asked))}
    assert levels == dict.fromkeys(asked, "debug") | {"/strategy": "warning"}


def test_no_log_line_holds_a_prompt_a_completion_or_a_key(
    keyed: LiveServer, stream: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = {"prompt": PROMPT, "sampling": {"max_tokens": 30, "stop": ["zzcanarystop"]}}
    stream_ = {"requests": [prompt], "stream": True}
    chat = {"messages": [{"role": "user", "content": PROMPT}]}
    push = {"version": "v", "path": f"/{PROMPT}/hangs", "rol": "x"}
    headers = {"x-forwarded-for": PROMPT, "user-agent": PROMPT}
    for status, body, path, more in (
        (200, {"requests": [prompt]}, "/generate", {}),
        (200, stream_, "/generate", headers),
        (404, {"model": "fake", "prompt": PROMPT}, "/v1/completions?api_key=canaryquery", {}),
        (200, chat, "/v1/chat/completions", {}),
        (400, {"requests": [{**prompt, PROMPT: 1}]}, "/generate", {}),
        (400, '{"requests": "' + PROMPT, "/generate", {}),
        (401, {"requests": [prompt]}, "/generate", {"authorization": f"Bearer wrong{KEY}"}),
        (400, push, "/update_weights", {}),
        (500, {"requests": [{"token_ids": [*PROMPT.encode(), FAILS]}]}, "/generate", {}),
    ):
        assert ask(keyed, body, path, **more).status_code == status, (body, path)
    slow_body(keyed)

    class Broken(Exception):
        pass

    async def breaks(*arguments: Any) -> Any:
        raise Broken(f"cannot take {PROMPT}, {KEY}")

    with monkeypatch.context() as patch:
        patch.setattr("tlt_server.frontend.generation.validation.Validator.batch", breaks)
        assert ask(keyed, {"requests": [prompt]}).json()["error"]["code"] == "internal"
    with monkeypatch.context() as patch:
        patch.setattr(
            "tlt_server.frontend.generation.choice.GrowingChoice.push",
            lambda self, output: exec("raise ValueError(self)", {"self": PROMPT}),
        )
        streamed = ask(keyed, {"requests": [prompt], "stream": True})
        assert streamed.status_code == 200 and "internal" in streamed.text
    assert ask(keyed, {"requests": [{"token_ids": [*PROMPT.encode(), DIES]}]}).status_code == 500

    accesses(stream, 13)
    text = stream.getvalue()
    assert {line["event"] for line in lines(stream)} >= {
        "request",
        "generated",
        "unexpected_error",
        "engine_gone",
    }
    assert [line["type"] for line in lines(stream) if line["event"] == "unexpected_error"] == [
        "Broken",
        "ValueError",
    ]
    assert any(
        "validation" in place or "native" in place
        for line in lines(stream)
        for place in line.get("frames", [])
    )
    for secret in (PROMPT, COMPLETION, KEY, "canary", str(list(PROMPT.encode()))[1:-1]):
        assert secret not in text, secret


def test_log_identifies_the_request_of_an_engine_death(model: Path, stream: io.StringIO) -> None:
    """The server has no keys, because a key would rest after the second death."""
    killer = {"requests": [{"token_ids": [65, DIES]}]}
    with live_server(model) as server:
        for step in range(3):
            ask(server, killer, **{"x-request-id": f"step-{step}"})
            until(lambda: not server.client.replica.failure)
        accesses(stream, 3)
    batches = {
        line["request_id"]: line["batch"] for line in lines(stream) if line["event"] == "generated"
    }
    for step, death in enumerate(line for line in lines(stream) if line["event"] == "engine_gone"):
        assert [f"{batches[f'step-{step}']}-0.0"] == death["ran"] and death["ran_in_all"] == 1
    assert step == 1
    (refused,) = [line for line in lines(stream) if line["event"] == "poisoned"]
    assert (refused["id"], refused["request_id"]) == (f"{batches['step-2']}-0.0", "step-2")
    assert refused["level"] == "warning"


def slow_body(server: LiveServer) -> None:
    """A body that never ends."""
    where = urlsplit(server.url)
    with closing(socket.create_connection((where.hostname, where.port), 5)) as connection:
        headers = (
            "POST /generate HTTP/1.1",
            "host: a",
            f"authorization: Bearer {KEY}",
            "content-length: 99",
            "",
            PROMPT,
        )
        connection.sendall("\r\n".join(headers).encode())
        assert connection.recv(1000).startswith(b"HTTP/1.1 ")


def test_library_log_lines_have_our_form_without_exception_text(stream: io.StringIO) -> None:
    try:
        raise KeyError(PROMPT)
    except KeyError as error:
        logging.getLogger("uvicorn.error").error("Exception in ASGI application\n", exc_info=error)
    logging.getLogger("httpcore").debug("headers %s", PROMPT)
    logging.getLogger("asyncio").warning("slow")
    first, second = lines(stream)
    assert (first["type"], first["level"]) == ("KeyError", "error")
    assert "test_logs" in first["frames"][0]
    assert second["event"] == "slow" and PROMPT not in stream.getvalue()


def test_unawaited_exception_is_logged_without_its_message(stream: io.StringIO) -> None:
    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(left_behind)
        task = asyncio.create_task(fails())
        await asyncio.sleep(0)
        del task
        await asyncio.sleep(0)

    async def fails() -> None:
        raise ValueError(PROMPT)

    asyncio.run(main())
    (line,) = lines(stream)
    assert (line["event"], line["type"]) == ("left_behind", "ValueError")
    assert PROMPT not in stream.getvalue()


@in_loop
async def test_a_failing_callback_is_logged_without_its_arguments(stream: io.StringIO) -> None:
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(left_behind)
    loop.call_soon(int, "prompt")
    loop.call_soon("prompt".index, "x")
    await asyncio.sleep(0)
    assert [line["what"] for line in lines(stream)] == [
        "Exception in callback int",
        "Exception in callback str.index",
    ]
    assert "prompt" not in stream.getvalue()


def test_log_form_is_chosen_by_name(stream: io.StringIO) -> None:
    for form in ("console", "json", None):
        out = io.StringIO()
        write_logs("warning", form, out)  # type: ignore[arg-type]
        structlog.get_logger().warning("shown", figure=3)
        structlog.get_logger().info("hidden")
        assert "shown" in out.getvalue() and "hidden" not in out.getvalue()
        assert out.getvalue().startswith("{") == (form != "console")


@pytest.mark.parametrize("form", ["console", "json"])
def test_an_unwritable_log_line_fails_no_request(
    stream: io.StringIO, monkeypatch: pytest.MonkeyPatch, form: Any
) -> None:
    out = io.StringIO()
    write_logs("warning", form, out)

    def disk_full(text: str) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(out, "write", disk_full)
    structlog.get_logger().warning("lost")
    logging.getLogger("a library").warning("lost")
    monkeypatch.undo()
    structlog.get_logger().warning("shown")
    assert "shown" in out.getvalue() and "lost" not in out.getvalue()
