"""Weights: push, commit, abort, roll back, look. The engine checks and decides; here bodies become commands and reports replies.

`POST /update_weights` dispatches on keys: `weight_dir` is what trainers with a shared disk send, anything else is the native manifest.
A reply comes when the push has ended: committed, staged (with `"commit": false`), unchanged (a repeated push), or refused.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal, cast

from msgspec import Meta, Struct
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from tlt_server.errors import (
    Conflict,
    EngineFailed,
    Forbidden,
    InvalidRequest,
    NotFound,
    PushFailed,
    Unavailable,
    WeightsRefused,
)
from tlt_server.frontend.endpoints import Endpoint, Parameter
from tlt_server.frontend.generation import Service
from tlt_server.frontend.replies import json_response
from tlt_server.frontend.requests import Strict, checked, read_object
from tlt_server.records import (
    AbortWeights,
    CommitWeights,
    InFlight,
    LookAtWeights,
    Manifest,
    PushWeights,
    RollbackWeights,
    TensorEntry,
    WeightReport,
    WeightState,
)

Version = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[^/\x00-\x1f\x7f]+$",
                               description="a name without slash or control characters, which every token will carry")]


class TensorFields(Strict):
    name: Annotated[str, Field(description="as the checkpoint names it; with role all, the drafter's begin with `draft.`")]
    dtype: Annotated[str, Field(description='as torch names it, such as "bfloat16"')] = ""
    shape: Annotated[list[Annotated[int, Field(ge=0, le=2**63 - 1)]] | None, Field(description="absent: not compared")] = None
    checksum: Annotated[str, Field(description='"sha256:<hex>" or "xxh3:<hex>" over the bytes pushed')] = ""


class ManifestFields(Strict):
    version: Version
    path: Annotated[str, Field(min_length=1, description="directory of safetensors, absolute or below the weight root")]
    role: Annotated[Literal["target", "drafter", "all"], Field(description="what is pushed; all: both in one transaction")] = "target"
    channel: Annotated[Literal["disk"], Field(description="how the tensors come")] = "disk"
    drafter_path: Annotated[str, Field(description="with role all: the drafter's directory")] = ""
    tensors: Annotated[list[TensorFields], Field(description="what must be there; empty: whatever the model has")] = []
    in_flight: Annotated[InFlight, Field(description="what becomes of running requests when the target changes")] = "continue"
    commit: Annotated[bool, Field(description="false: stay staged until POST /weights/{version}/commit")] = True


class DirectoryFields(BaseModel):
    """What trainers with a shared disk send; other fields are ignored."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)

    weight_dir: Annotated[str, Field(min_length=1, description="directory of safetensors, absolute or below the weight root")]
    weight_version: Annotated[Version | None, Field(description="absent: the directory's name and digest")] = None
    version: Annotated[Version | None, Field(description="the same, where weight_version is absent")] = None


class RollbackFields(Strict):
    to: Annotated[str, Field(description="the version to be live after it; makes a repeated call safe")] = ""
    in_flight: Annotated[InFlight, Field(description="what becomes of running requests when the target changes")] = "continue"


class NoFields(Strict):
    """Nothing; a body may be left out."""


PushState = Literal["committed", "staged", "unchanged", "aborted", "named", "rolled_back"]


class PushReply(Struct, frozen=True):
    """What became of a push, a commit, an abort or a rollback."""

    state: Annotated[PushState, Meta(
        description="what became of it; unchanged: the same push had been committed before, or nothing was pushed")]
    version: Annotated[str, Meta(description="of the push")]
    role: Annotated[str, Meta(description="what was pushed")]
    weight_version: Annotated[str, Meta(description="the target's version that is live now")]
    checksums: Annotated[dict[str, str], Meta(description="of the tensors pushed: sha256 of their float32 values, by name")]
    phases_s: Annotated[dict[str, float], Meta(description="what the push took, by phase, in seconds")]
    pause_ms: Annotated[float, Meta(description="for which the commit kept the loop from stepping")]


def routes(service: Service) -> list[Endpoint]:
    engine, session, answer = service.engine, service.session, service.session.ask

    async def update(request: Request) -> Response:
        """Push weights from disk: stage and verify beside the running loop, commit between two steps.

        Until everything is verified nothing live changes. A repeated push of the same version and content is a success. With
        weight_dir in place of version and path, the form of trainers with a shared disk, the version is the directory's name and digest;
        between POST /start_weight_update and /finish_weight_update such a push is committed by the latter.
        """
        engine.check_running()
        body = _content(await request.body(), "version")
        manifest = _manifest(body)
        if "weight_dir" in body:
            return outcome(await session.push(manifest))
        return outcome(await answer(PushWeights(engine.command_id(), manifest)))

    async def commit(request: Request) -> Response:
        """Make a staged push live."""
        checked(NoFields, _content(await request.body(), "nothing"))
        return outcome(await answer(CommitWeights(engine.command_id(), request.path_params["version"])))

    async def abort(request: Request) -> Response:
        """End a push that is not committed; nothing changes."""
        checked(NoFields, _content(await request.body(), "nothing"))
        return outcome(await answer(AbortWeights(engine.command_id(), request.path_params["version"])))

    async def rollback(request: Request) -> Response:
        """Make the version before the last commit live again, bit for bit."""
        asked = checked(RollbackFields, _content(await request.body(), "to"))
        return outcome(await answer(RollbackWeights(engine.command_id(), asked.to, asked.in_flight)))

    async def look(request: Request) -> Response:
        """Which versions are live, kept for a rollback, and on their way."""
        return json_response((await answer(LookAtWeights(engine.command_id()))).state)

    gone = (EngineFailed, Unavailable)
    pushed = partial(Endpoint, "POST", needs="push-weights", takes=NoFields, optional_body=True, gives=PushReply,
                     parameters=(Parameter("version", "path", "the version that the push named"),))
    return [
        Endpoint("POST", "/update_weights", update, needs="push-weights", takes=ManifestFields | DirectoryFields,
                 example={"version": "step-7", "path": "step-7"}, gives=PushReply,
                 raises=(Forbidden, NotFound, Conflict, WeightsRefused, PushFailed, *gone)),
        Endpoint("GET", "/weights", look, needs="push-weights", gives=WeightState, raises=gone),
        Endpoint("POST", "/weights/rollback", rollback, needs="push-weights", takes=RollbackFields, optional_body=True,
                 gives=PushReply, raises=(Conflict, PushFailed, *gone)),
        pushed("/weights/{version}/commit", commit, raises=(NotFound, Conflict, WeightsRefused, PushFailed, *gone)),
        pushed("/weights/{version}/abort", abort, raises=(NotFound, Conflict, *gone)),
    ]


def _content(body: bytes, field: str) -> dict[str, Any]:
    """No body at all is an empty object."""
    return read_object(body, field) if body else {}


def outcome(report: WeightReport) -> Response:
    return json_response(PushReply(cast(PushState, report.result), report.version, report.role, report.state.target,
                                   report.checksums, report.phases, report.pause_ms))


def _manifest(body: dict[str, Any]) -> Manifest:
    """A push that the engine can try, or `InvalidRequest`."""
    if "update_info" in body:
        raise InvalidRequest("update_info announces tensors over the network, which this server does not take; write safetensors below the "
                             'weight root and push their directory: {"version": ..., "path": ...}')
    if "weight_dir" in body:
        if not body["weight_dir"]:
            raise InvalidRequest(f"weight_dir is {body['weight_dir']!r}; name a directory below the weight root")
        directory = checked(DirectoryFields, body)
        return Manifest(version=directory.weight_version or directory.version or "", path=directory.weight_dir)
    asked = checked(ManifestFields, body)
    if (asked.role == "all") != bool(asked.drafter_path):
        raise InvalidRequest(f"role is {asked.role!r} and drafter_path is {asked.drafter_path[:80]!r}; "
                             "role all needs path (the target's) and drafter_path, other roles only path")
    tensors = [TensorEntry(name=t.name, dtype=t.dtype, shape=t.shape, checksum=t.checksum) for t in asked.tensors]
    return Manifest(role=asked.role, version=asked.version, channel=asked.channel, path=asked.path, drafter_path=asked.drafter_path,
                    tensors=tensors, in_flight=asked.in_flight, commit=asked.commit)
