"""Routes that pause, sleep, abort, clear the prefix cache and describe this server, as clients of
vLLM and trainers that drive it call them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from msgspec import Meta, Struct
from starlette.requests import Request

from tlt_client.fields import ShortName
from tlt_server import __version__
from tlt_server.errors import Conflict, InvalidRequest, StorageFailed
from tlt_server.frontend.dialects.replies.errors import fault
from tlt_server.frontend.generation.requests import NAMES
from tlt_server.frontend.http.auth import caller_of
from tlt_server.frontend.http.endpoints import Routes, Unread
from tlt_server.frontend.http.fields import AnyFields, Tolerant
from tlt_server.frontend.http.replies import Status
from tlt_server.frontend.service import Service
from tlt_server.wire.commands import InFlight, Memory

ROUTES = Routes(error_shape=fault, empty=AnyFields)
MODES: dict[str, InFlight] = {"abort": "abort", "wait": "drain", "keep": "continue"}
LEVELS: dict[str, list[Memory]] = {"0": [], "1": ["kv_cache"], "2": ["weights", "kv_cache"]}
TAGS: dict[str, list[Memory]] = {"weights": ["weights"], "kv_cache": ["kv_cache"], "scheduling": []}
Mode = Annotated[Literal["abort", "wait", "keep"], "what becomes of running sequences"]
Level = Annotated[Literal["0", "1", "2"], "what is given back; 0: nothing, generation only stops"]
Tag = Literal["weights", "kv_cache", "scheduling"]


class VllmAbort(Tolerant, frozen=True, kw_only=True):
    request_ids: Annotated[
        Annotated[list[ShortName], Meta(min_length=1, extra={"limit": NAMES})],
        "names that requests were given; without a body all that is open is aborted",
    ]


class Paused(Struct, frozen=True):
    status: Annotated[Literal["paused", "resumed"], "what holds now"]


class IsPaused(Struct, frozen=True):
    is_paused: Annotated[bool, "whether a pause holds"]


class IsSleeping(Struct, frozen=True):
    is_sleeping: Annotated[bool, "whether any memory is given back"]


class VllmAborted(Struct, frozen=True):
    aborted: Annotated[int, "sequences that this ends"]
    status: Annotated[Literal["aborted"], "always the same"] = "aborted"


class Succeeded(Struct, frozen=True):
    success: Annotated[bool, "always true: a failure is an error"] = True


class Load(Struct, frozen=True):
    server_load: Annotated[int, "sequences accepted and not ended"]


class ServerVersion(Struct, frozen=True):
    version: Annotated[str, "version of the server"]


@ROUTES.post("/pause", needs="operate")
async def pause(
    service: Service,
    mode: Mode = "abort",
    clear_cache: Annotated[bool, "forget cached prefixes too; without effect for keep"] = True,
) -> Paused:
    """Stop generating until POST /resume.

    `abort` ends running sequences with what they have, `wait` replies when they have ended; both
    refuse new requests with 503. `keep` freezes running sequences with their KV, and new requests
    wait.
    """
    await service.engine.pauses.pause(
        MODES[mode], refuse=mode != "keep", clear_cache=clear_cache and mode != "keep"
    )
    return Paused("paused")


@ROUTES.post("/resume", needs="operate")
async def resume(service: Service) -> Paused:
    """Continue what was frozen, start what has waited, and take new requests."""
    await service.engine.pauses.resume()
    return Paused("resumed")


@ROUTES.get("/is_paused", needs="any")
async def is_paused(service: Service) -> IsPaused:
    """Return whether a pause holds."""
    return IsPaused(service.engine.pauses.paused)


@ROUTES.post("/inference/v1/abort_requests", needs="data", optional_body=True, changes=True)
@ROUTES.post("/abort_requests", needs="data", optional_body=True, changes=True)
async def abort_requests(
    service: Service, body: Unread[VllmAbort], request: Request
) -> VllmAborted:
    """End requests with what they have; their replies have the finish_reason "abort".

    Without a body this ends everything that is open. To end another key's requests, or all of
    them, needs the scope operate.
    """
    service.engine.check_running()
    if not await request.body():
        return VllmAborted(service.abort(None, caller_of(request)))
    try:
        names = (await body.read()).request_ids
    except InvalidRequest as error:
        raise InvalidRequest(
            f"{error.message}; name requests in request_ids, or send no body to abort all"
        ) from None
    return VllmAborted(service.abort(names, caller_of(request)))


@ROUTES.post("/reset_prefix_cache", needs="operate")
async def reset_prefix_cache(service: Service) -> Succeeded:
    """Forget every cached prefix.

    Running sequences continue with their own KV, which then serves no other request.
    """
    await service.engine.pauses.clear_cache(unless_held=False)
    return Succeeded()


@ROUTES.post("/reset_mm_cache", needs="operate", engine_fails=False)
@ROUTES.post("/reset_encoder_cache", needs="operate", engine_fails=False)
async def reset_none(service: Service) -> str:
    """Do nothing: this server reads text, so there is no such cache."""
    return ""


@ROUTES.post("/sleep", needs="operate", raises=(Conflict, StorageFailed))
async def sleep(service: Service, level: Level = "1", mode: Mode = "abort") -> str:
    """Give memory back: level 1 the KV, level 2 the weights of target and drafter too.

    New requests get 503 until all is awake. `abort` ends running sequences, `wait` lets them end
    first, and `keep` drops their KV: they continue with the same tokens after POST /wake_up. Level
    0 is a pause in which new requests wait, until POST /wake_up or /resume.
    """
    if LEVELS[level]:
        await service.sleep(LEVELS[level], "recompute" if mode == "keep" else MODES[mode])
    else:
        await service.engine.pauses.pause(MODES[mode], refuse=False, clear_cache=False)
    return ""


@ROUTES.post("/release_kv_cache_memory", needs="operate", raises=(Conflict, StorageFailed))
async def release_kv(service: Service) -> str:
    """Give the KV's memory back. What runs continues with the same tokens after POST /wake_up."""
    await service.sleep(["kv_cache"])
    return ""


@ROUTES.post("/wake_up", needs="operate")
async def wake_up(
    service: Service, tags: Annotated[Sequence[Tag], "what to take again; absent: everything"] = ()
) -> str:
    """Take memory again, without tags all of it, with the same bits in the weights as before.

    The tag `scheduling` ends a pause, and so does a call without tags where no memory is given
    back.
    """
    pauses = service.engine.pauses
    resumes = "scheduling" in tags or not (tags or pauses.asleep)
    await pauses.wake([memory for tag in tags or TAGS for memory in TAGS[tag]])
    if resumes:
        await pauses.resume()
    return ""


@ROUTES.get("/is_sleeping", needs="any")
async def is_sleeping(service: Service) -> IsSleeping:
    """Return whether any memory is given back."""
    return IsSleeping(bool(service.engine.pauses.asleep))


@ROUTES.get("/load", needs="any")
async def load(service: Service) -> Load:
    """Count the sequences that are open."""
    return Load(len(service.engine))


@ROUTES.get("/version", needs="any")
async def version(service: Service) -> ServerVersion:
    """Return the version of the server."""
    return ServerVersion(__version__)


@ROUTES.get("/ping", needs="open")
async def ping(service: Service) -> Status:
    """Check that this process works and its engine has not gone for good."""
    service.engine.replica.check_alive()
    return Status()
