"""Calls of the OpenAI dialect, and a server with small limits for them."""

import json
from typing import Any

import httpx

from tests.frontend.live_server import LiveServer, serving

USER = [{"role": "user", "content": "hi"}]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


server = serving(
    served_model_name="tiny", max_n=8, max_batch_items=4, max_logprobs=5, max_stop_strings=2
)


def post(server: LiveServer, path: str, **body: Any) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=120)


def done(server: LiveServer, path: str, **body: Any) -> dict[str, Any]:
    response = post(server, path, **body)
    assert response.status_code == 200, response.text
    return response.json()


def complete(server: LiveServer, **body: Any) -> dict[str, Any]:
    return done(server, "/v1/completions", **body)


def chat(server: LiveServer, **body: Any) -> dict[str, Any]:
    return done(server, "/v1/chat/completions", **{"messages": USER, **body})


def chunks(server: LiveServer, path: str, **body: Any) -> list[dict[str, Any]]:
    response = post(server, path, stream=True, **body)
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    frames = response.text.strip().split("\n\n")
    assert frames[-1] == "data: [DONE]" and all(frame.startswith("data: ") for frame in frames)
    return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-1]]
