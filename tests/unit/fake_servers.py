"""Servers for the coordinator over HTTP: load, trainer and drafter are attributes that a test sets,
and what the coordinator asks is carried out and noted.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tlt_server.wire.training import trained_for


class FakeServer:
    def __init__(self, samples: list[bytes]) -> None:
        self.load, self.state, self.adopted = 0, "idle", 0
        self.held_s: float | None = None  # time of the pause; None: it has no end
        self.target, self.drafter = "t0", "d0"
        self.file = b"weights of d0"
        self.samples = samples
        self.taken: list[bytes] = []
        self.parts: dict[str, bytes] = {}
        self.refuses_push = self.gone = self.junk = False
        self.refusal: dict[str, Any] | None = None  # the error of every reply
        self.delay_s = 0.0
        self.slow_push: threading.Event | None = None  # is waited for before a push is answered
        self.pushes = 0
        self.stopped = threading.Event()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = -1  # one packet per reply

            def do_GET(self) -> None:
                self._answer("GET")

            def do_POST(self) -> None:
                self._answer("POST")

            def do_PUT(self) -> None:
                self._answer("PUT")

            def _answer(self, method: str) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                if fake.gone:
                    self.close_connection = True
                    return
                fake.stopped.wait(fake.delay_s)
                status, reply, headers = fake.answer(method, self.path, body)
                data = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
                self.send_response(status)
                for name, value in {**headers, "content-length": str(len(data))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                """Say nothing."""

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def stop(self) -> None:
        self.stopped.set()
        self._http.shutdown()
        self._http.server_close()

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any, dict[str, str]]:
        parts = urlsplit(path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        name = parts.path
        if self.refusal is not None:
            return 403, {"error": self.refusal}, {}
        if self.junk:
            return 200, {}, {}
        if method == "PUT":
            self.parts[name] = self.parts.get(name, b"") + body
            return 200, {"bytes": len(self.parts[name]), "begins": True}, {}
        if (method, name) == ("POST", "/drafter/samples"):
            self.taken.append(body)
            return 200, {"sequences": 1, "refused": 0, "refusals": []}, {}
        if (method, name) == ("GET", "/drafter/samples"):
            return self._samples(int(query["after"]))
        if name.startswith("/drafter/files/"):
            return 200, self.file[int(query["start"]) :], {}
        if method == "POST" and name in ("/drafter/train", "/drafter/resume", "/drafter/pause"):
            return self._order(name.removeprefix("/drafter/"), body)
        if (method, name) == ("POST", "/update_weights"):
            return self._update(json.loads(body))
        trainer = {
            "state": self.state,
            "reason": "",
            "adopted": self.adopted,
            "refused": {},
            "pause_left_s": self.held_s,
        }
        replies: dict[str, Any] = {
            "/load": {"server_load": self.load},
            "/drafter": {
                "trainer": trainer,
                "drafters": [
                    {"weight_version": self.drafter, "trained_for": trained_for(self.drafter)}
                ],
            },
            "/weights": {"target": self.target, "drafter": self.drafter, "previous": {}},
            "/drafter/files": {
                "version": self.drafter,
                "files": [{"name": "model.safetensors", "bytes": len(self.file)}],
            },
        }
        return 200, replies[name], {}

    def _order(self, order: str, body: bytes) -> tuple[int, Any, dict[str, str]]:
        for_s = json.loads(body or b"{}").get("for_s")
        others = self.state == "paused" and self.held_s is None
        if order == "train" and self.state == "paused":
            error = {"code": "conflict", "message": "it is paused", "retryable": False}
            return 409, {"error": error}, {}
        if order != "pause" or for_s is None or not others:
            pauses = order == "pause" and for_s != 0
            self.state = "training" if order == "train" else "paused" if pauses else "idle"
            self.held_s = for_s if pauses else None
        return 200, {"state": self.state}, {}

    def _samples(self, after: int) -> tuple[int, Any, dict[str, str]]:
        found = self.samples[after : after + 1]
        left = max(0, len(self.samples) - after - 1)
        headers = {"x-samples-after": str(after + len(found)), "x-samples-left": str(left)}
        return 200, b"".join(found), headers

    def _update(self, manifest: dict[str, Any]) -> tuple[int, Any, dict[str, str]]:
        if self.refuses_push:
            error = {"code": "weights_refused", "message": "another shape", "retryable": False}
            return 422, {"error": error}, {}
        self.pushes += 1
        if self.slow_push is not None:
            self.slow_push.wait(30)
        [self.file] = self.parts.values()
        self.parts.clear()
        assert manifest["role"] == "drafter"
        self.drafter = manifest["version"]
        return 200, {"state": "live"}, {}
