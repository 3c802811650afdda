"""Calls by which servers that share a drafter exchange what is recorded and the drafter's files. A
client fetches the files of a candidate by the same calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import httpx

from tlt_client.calls import Call
from tlt_client.errors import Conflict
from tlt_client.flows import Flow, tried
from tlt_client.responses import in_path, json_object, succeeded
from tlt_client.retries import Retries

Of = Literal["live", "candidate"]


def add_drafter_samples(content: bytes) -> Call[Mapping[str, Any]]:
    headers = {"content-type": "application/octet-stream"}
    return Call("POST", "/drafter/samples", json_object, content, headers, repeatable=True)


def drafter_files(of: Of) -> Call[Mapping[str, Any]]:
    return Call("GET", "/drafter/files", json_object, params={"of": of}, repeatable=True)


def drafter_file(version: str, name: str, start: int, of: Of) -> Call[bytes]:
    def read(response: httpx.Response) -> bytes:
        return succeeded(response).content

    params: dict[str, float | str] = {"version": version, "start": start, "of": of}
    return Call("GET", f"/drafter/files/{in_path(name)}", read, params=params, repeatable=True)


def fetch_drafter(
    directory: str | PathLike[str], of: Of, retries: Retries
) -> Flow[Mapping[str, Any]]:
    """Write a drafter's files into a directory, which is made where it is missing, and return the
    listing. `Conflict`: meanwhile another drafter took its place.
    """
    listed: Mapping[str, Any] = yield from tried(drafter_files(of), retries)
    place, version = Path(directory), str(listed["version"])
    place.mkdir(parents=True, exist_ok=True)
    for file in listed["files"]:
        name = str(file["name"])
        if Path(name).name != name:
            raise Conflict("conflict", f"the server names the file {name!r}", status=409)
        with open(place / name, "wb") as out:
            while out.tell() < file["bytes"]:
                start = out.tell()
                data = yield from tried(drafter_file(version, name, start, of), retries)
                if not data:
                    raise Conflict("conflict", f"{name} became shorter; begin again", status=409)
                out.write(data)
    return listed
