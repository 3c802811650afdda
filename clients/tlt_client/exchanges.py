"""Calls by which servers that share a drafter exchange what is recorded and the drafter's files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx

from tlt_client.calls import Call
from tlt_client.responses import in_path, json_object, succeeded


def add_drafter_samples(content: bytes) -> Call[Mapping[str, Any]]:
    headers = {"content-type": "application/octet-stream"}
    return Call("POST", "/drafter/samples", json_object, content, headers, repeatable=True)


def drafter_files() -> Call[Mapping[str, Any]]:
    return Call("GET", "/drafter/files", json_object, repeatable=True)


def drafter_file(version: str, name: str, start: int) -> Call[bytes]:
    def read(response: httpx.Response) -> bytes:
        return succeeded(response).content

    params: dict[str, float | str] = {"version": version, "start": start}
    return Call("GET", f"/drafter/files/{in_path(name)}", read, params=params, repeatable=True)
