"""Operations on the drafter: its training, and the exchange between servers that share a
drafter.
"""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import httpx

from tlt_client.calls import Call, put
from tlt_client.errors import Conflict
from tlt_client.flows import Flow, tried
from tlt_client.responses import in_path, json_object, succeeded
from tlt_client.retries import Retries
from tlt_client.wire import DrafterSamples

Of = Literal["live", "candidate"]


def drafter() -> Call[Mapping[str, Any]]:
    """Return the served drafters, with their recent acceptance, and the recorded training
    sequences.
    """
    return Call("GET", "/drafter", json_object, repeatable=True)


def train_drafter() -> Call[Mapping[str, Any]]:
    """Start a round of training once the server's mode allows it; return the trainer's state."""
    return put("POST", "/drafter/train", {}, json_object)


def pause_drafter_training(for_s: float | None = None) -> Call[Mapping[str, Any]]:
    """Pause training and adoption until `resume_drafter_training`, or for `for_s` seconds from the
    last such call, which changes no other pause; return the trainer's state.
    """
    fields = {} if for_s is None else {"for_s": for_s}
    return put("POST", "/drafter/pause", fields, json_object, repeatable=True)


def resume_drafter_training() -> Call[Mapping[str, Any]]:
    """Continue after a pause; return the trainer's state."""
    return put("POST", "/drafter/resume", {}, json_object, repeatable=True)


def rollback_drafter() -> Call[Mapping[str, Any]]:
    """Restore the previous drafter; the target stays."""
    return put("POST", "/drafter/rollback", {}, json_object)


def export_drafter(name: str, layout: str = "eagle3") -> Call[Mapping[str, Any]]:
    """Write the live drafter below the server's state directory, in the layout of another engine;
    return its path.
    """
    return put("POST", "/drafter/export", {"name": name, "layout": layout}, json_object)


def drafter_samples(after: int = 0, *, limit: int = 256) -> Call[DrafterSamples]:
    """Return recorded sequences, prompts included, oldest first, as the content of a segment file.
    To continue, give `after` of the last reply; a `left` of 0 means that none are left.
    """

    def read(response: httpx.Response) -> DrafterSamples:
        headers, content = succeeded(response).headers, response.content
        return DrafterSamples(
            content, int(headers["x-samples-after"]), int(headers["x-samples-left"])
        )

    params = {"after": after, "limit": limit}
    return Call("GET", "/drafter/samples", read, params=params, repeatable=True)


def add_drafter_samples(content: bytes) -> Call[Mapping[str, Any]]:
    """Send a server the content of another server's `drafter_samples` for the same target."""
    headers = {"content-type": "application/octet-stream"}
    return Call("POST", "/drafter/samples", json_object, content, headers, repeatable=True)


def drafter_files(of: Of = "live") -> Call[Mapping[str, Any]]:
    """Return version and files of the live drafter, or of the last `candidate` of the server's
    trainer, with its trial.
    """
    return Call("GET", "/drafter/files", json_object, params={"of": of}, repeatable=True)


def drafter_file(version: str, name: str, *, start: int = 0, of: Of = "live") -> Call[bytes]:
    """Return 8 MiB of a file of such a drafter from byte `start` on, or what is left."""
    params: dict[str, float | str] = {"version": version, "start": start, "of": of}
    path = f"/drafter/files/{in_path(name)}"
    return Call(
        "GET", path, lambda response: succeeded(response).content, params=params, repeatable=True
    )


def fetch_drafter(
    directory: str | PathLike[str], of: Of, retries: Retries
) -> Flow[Mapping[str, Any]]:
    """Write a drafter's files into a directory, created if necessary, and return the listing.
    `Conflict` if another drafter has replaced it meanwhile.
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
                data = yield from tried(drafter_file(version, name, start=start, of=of), retries)
                if not data:
                    raise Conflict("conflict", f"{name} became shorter; start again", status=409)
                out.write(data)
    return listed
