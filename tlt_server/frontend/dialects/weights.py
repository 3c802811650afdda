"""Weights: push, commit, abort, roll back, look. The engine checks and decides; here bodies become commands and reports replies.

`POST /update_weights` dispatches on keys: `weight_dir` is what trainers with a shared disk send, anything else is the native manifest.
A reply comes when the push has ended: committed, staged (with `"commit": false`), unchanged (a repeated push), or refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tlt_server.config import nearest
from tlt_server.errors import InvalidRequest, from_code
from tlt_server.frontend.generation import Service
from tlt_server.frontend.replies import json_response
from tlt_server.records import (
    AbortWeights,
    CommitWeights,
    LookAtWeights,
    Manifest,
    PushWeights,
    RollbackWeights,
    TensorEntry,
    WeightCommand,
    WeightReport,
)

MAX_VERSION_CHARS = 256
ACTIONS = ("checksum", "compare", "reset")
_T = TypeVar("_T")


def routes(service: Service) -> list[Route]:
    engine = service.engine
    baseline: dict[str, str] = {}  # what `reset` remembered for `compare`

    async def answer(command: WeightCommand) -> WeightReport:
        report = await engine.weights(command)
        if report.error is not None:
            raise from_code(*report.error)
        return report

    async def update(request: Request) -> Response:
        engine.check_available()
        manifest = _manifest(await _body(request))
        return json_response(_outcome(await answer(PushWeights(engine.command_id(), manifest))))

    async def commit(request: Request) -> Response:
        return json_response(_outcome(await answer(CommitWeights(engine.command_id(), request.path_params["version"]))))

    async def abort(request: Request) -> Response:
        return json_response(_outcome(await answer(AbortWeights(engine.command_id(), request.path_params["version"]))))

    async def rollback(request: Request) -> Response:
        body = await _body(request)
        _refuse_unknown(body, ("to", "in_flight"))
        command = _convert({**body, "id": engine.command_id(), "type": "rollback_weights"}, RollbackWeights)
        return json_response(_outcome(await answer(command)))

    async def look(request: Request) -> Response:
        return json_response((await answer(LookAtWeights(engine.command_id()))).state)

    async def info(request: Request) -> Response:
        state = (await answer(LookAtWeights(engine.command_id()))).state
        return json_response({"weight_version": state.target, "drafter_version": state.drafter})

    async def check(request: Request) -> Response:
        body = await _body(request)
        action, given = body.get("action", "checksum"), body.get("baseline") or baseline
        if action not in ACTIONS:
            raise InvalidRequest(f"action is {str(action)[:80]!r}; known are {', '.join(ACTIONS)}")
        if action == "compare" and not (isinstance(given, dict) and given):
            raise InvalidRequest("there is nothing to compare with; give baseline as an object of checksums, "
                                 "or call with action reset first")
        sums = (await answer(LookAtWeights(engine.command_id(), checksums=True))).checksums
        if action == "reset":
            baseline.clear()
            baseline.update(sums)
        if action == "compare":
            mismatches = sorted(name for name in sums.keys() | given.keys() if sums.get(name) != given.get(name))
            return json_response({"match": not mismatches, "mismatches": mismatches})
        return json_response({"checksums": sums})

    return [
        Route("/update_weights", update, methods=["POST"]),
        Route("/weights", look, methods=["GET"]),
        Route("/weights/rollback", rollback, methods=["POST"]),
        Route("/weights/{version:path}/commit", commit, methods=["POST"]),
        Route("/weights/{version:path}/abort", abort, methods=["POST"]),
        Route("/weight_checker", check, methods=["POST"]),
        Route("/weight_info", info, methods=["GET"]),
    ]


def _outcome(report: WeightReport) -> dict[str, Any]:
    return {"state": report.result, "version": report.version, "role": report.role, "weight_version": report.state.target,
            "checksums": report.checksums, "phases_s": report.phases, "pause_ms": report.pause_ms}


async def _body(request: Request) -> dict[str, Any]:
    """A JSON object; no body at all is an empty one."""
    data = await request.body()
    try:
        content = msgspec.json.decode(data) if data else {}
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not JSON: {error}; send one UTF-8 encoded JSON object") from None
    if not isinstance(content, dict):
        raise InvalidRequest(f"the body is a {type(content).__name__}; it must be a JSON object")
    return content


def _manifest(body: dict[str, Any]) -> Manifest:
    """A push that the engine can try, or `InvalidRequest`."""
    if "update_info" in body:
        raise InvalidRequest("update_info announces tensors over the network, which this server does not take; write safetensors below the "
                             "weight root and push their directory: {\"version\": ..., \"path\": ...}")
    if "weight_dir" in body:
        if not isinstance(body["weight_dir"], str):
            raise InvalidRequest(f"weight_dir is {body['weight_dir']!r}; name a directory below the weight root")
        body = {"path": body["weight_dir"], "version": body.get("weight_version") or body.get("version") or ""}
    elif "version" not in body:
        raise InvalidRequest("the manifest has no version; give the weights a name, which every token will carry")
    _refuse_unknown(body, Manifest.__struct_fields__)
    for entry in body["tensors"] if isinstance(body.get("tensors"), list) else ():
        if isinstance(entry, dict):
            _refuse_unknown(entry, TensorEntry.__struct_fields__)
    manifest = _convert(body, Manifest)
    if manifest.channel != "disk":
        raise InvalidRequest(f"channel is {manifest.channel[:80]!r}; this server takes weights by: disk")
    if not manifest.path:
        raise InvalidRequest("the manifest has no path; name a directory below the weight root")
    if (manifest.role == "all") != bool(manifest.drafter_path):
        raise InvalidRequest(f"role is {manifest.role!r} and drafter_path is {manifest.drafter_path[:80]!r}; "
                             "role all needs path (the target's) and drafter_path, other roles only path")
    if len(manifest.version) > MAX_VERSION_CHARS or not manifest.version.isprintable():
        raise InvalidRequest(f"version has {len(manifest.version)} characters; it must be printable, {MAX_VERSION_CHARS} at most")
    return manifest


def _refuse_unknown(body: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for field in body:
        if field not in known:
            raise InvalidRequest(f"unknown field {field[:80]}{nearest(field, known)} (known: {', '.join(known)})")


def _convert(content: dict[str, Any], kind: type[_T]) -> _T:
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{error}; correct that field") from None
