"""Routes that pause, sleep, abort and clear the prefix cache, as trainers that drive vLLM call
them.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from tlt_server.errors import Conflict, Forbidden, StorageFailed
from tlt_server.frontend.dialects.replies.errors import GONE
from tlt_server.frontend.dialects.vllm_rl.replies import (
    IsPaused,
    IsSleeping,
    Paused,
    Succeeded,
    VllmDone,
    fault,
)
from tlt_server.frontend.dialects.vllm_rl.requests import VllmAbort, read
from tlt_server.frontend.http.auth import caller_of
from tlt_server.frontend.http.endpoints import Parameter, Routes
from tlt_server.frontend.http.fields import AnyFields
from tlt_server.frontend.http.queries import flag, word, words
from tlt_server.frontend.http.replies import json_response
from tlt_server.frontend.service import Service
from tlt_server.records import InFlight, Memory

ROUTES = Routes(error_shape=fault)
MODES: dict[str, InFlight] = {"abort": "abort", "wait": "drain", "keep": "continue"}
LEVELS: dict[str, list[Memory]] = {"1": ["kv_cache"], "2": ["weights", "kv_cache"]}
TAGS: dict[str, list[Memory]] = {"weights": ["weights"], "kv_cache": ["kv_cache"], "scheduling": []}
MODE = Parameter(
    "mode",
    "query",
    "what becomes of what runs",
    {"type": "string", "enum": [*MODES], "default": "abort"},
)
CLEAR_CACHE = Parameter(
    "clear_cache",
    "query",
    "forget cached prefixes too; without effect for keep",
    {"type": "boolean", "default": True},
)
LEVEL = Parameter(
    "level", "query", "what is given back", {"type": "string", "enum": [*LEVELS], "default": "1"}
)
TAG_LIST = Parameter(
    "tags",
    "query",
    "what to take again; absent: everything",
    {"type": "array", "items": {"type": "string", "enum": [*TAGS]}},
)


@ROUTES.post(
    "/pause",
    optional_body=True,
    needs="operate",
    parameters=(MODE, CLEAR_CACHE),
    takes=AnyFields,
    gives=Paused,
    raises=GONE,
)
async def pause(service: Service, request: Request) -> Response:
    """Stop generating until POST /resume.

    `abort` ends what runs with what it has, `wait` answers when it has ended; both refuse new
    requests with 503. `keep` freezes what runs with its KV, and new requests wait.
    """
    await read(AnyFields, request)
    mode = word(request, "mode", MODES, "abort")
    clear = flag(request, "clear_cache", default=True)
    await service.engine.pauses.pause(
        MODES[mode], refuse=mode != "keep", clear_cache=clear and mode != "keep"
    )
    return json_response(Paused("paused"))


@ROUTES.post(
    "/resume", optional_body=True, needs="operate", takes=AnyFields, gives=Paused, raises=GONE
)
async def resume(service: Service, request: Request) -> Response:
    """Go on with what was frozen or has waited, and take new requests."""
    await read(AnyFields, request)
    await service.engine.pauses.resume()
    return json_response(Paused("resumed"))


@ROUTES.get("/is_paused", needs="any", gives=IsPaused)
async def is_paused(service: Service, request: Request) -> Response:
    """Whether a pause holds."""
    return json_response(IsPaused(service.engine.pauses.paused))


@ROUTES.post(
    "/abort_requests",
    optional_body=True,
    needs="data",
    takes=VllmAbort,
    gives=VllmDone,
    raises=(Forbidden, *GONE),
)
async def abort_requests(service: Service, request: Request) -> Response:
    """End requests with what they have; their replies say finish_reason "abort". Another key's,
    and all of them, need operate.
    """
    service.engine.check_running()
    names = (await read(VllmAbort, request)).request_ids
    service.abort(names or None, caller_of(request))
    return json_response(
        VllmDone(f"aborted {'what was named and open' if names else 'all that was open'}")
    )


@ROUTES.post(
    "/reset_prefix_cache",
    optional_body=True,
    needs="operate",
    takes=AnyFields,
    gives=Succeeded,
    raises=GONE,
)
async def reset_prefix_cache(service: Service, request: Request) -> Response:
    """Forget every cached prefix; what runs goes on with its own KV, which then serves nobody
    else.
    """
    await read(AnyFields, request)
    await service.engine.pauses.clear_cache(unless_held=False)
    return json_response(Succeeded())


@ROUTES.post(
    "/sleep",
    optional_body=True,
    needs="operate",
    parameters=(LEVEL, MODE),
    takes=AnyFields,
    gives=Succeeded,
    raises=(Conflict, StorageFailed, *GONE),
)
async def sleep(service: Service, request: Request) -> Response:
    """Give memory back: level 1 the KV, level 2 the weights of target and drafter too. New
    requests get 503 until all is awake.

    `abort` ends what runs, `wait` lets it end first, `keep` drops its KV: it goes on with the
    same tokens after POST /wake_up.
    """
    await read(AnyFields, request)
    level, mode = word(request, "level", LEVELS, "1"), word(request, "mode", MODES, "abort")
    await service.engine.pauses.sleep(LEVELS[level], "recompute" if mode == "keep" else MODES[mode])
    return json_response(Succeeded())


@ROUTES.post(
    "/wake_up",
    optional_body=True,
    needs="operate",
    parameters=(TAG_LIST,),
    takes=AnyFields,
    gives=Succeeded,
    raises=GONE,
)
async def wake_up(service: Service, request: Request) -> Response:
    """Take memory again, weights bit for bit as they were; without tags all of it."""
    await read(AnyFields, request)
    asked = words(request, "tags", TAGS)
    await service.engine.pauses.wake([memory for tag in asked or TAGS for memory in TAGS[tag]])
    return json_response(Succeeded())


@ROUTES.get("/is_sleeping", needs="any", gives=IsSleeping)
async def is_sleeping(service: Service, request: Request) -> Response:
    """Whether any memory is given back."""
    return json_response(IsSleeping(bool(service.engine.pauses.asleep)))
