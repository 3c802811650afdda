"""The dialect `vllm_rl`: what trainers that drive vLLM call to pause, sleep, abort, push weights
and generate from token ids.

It only translates: pauses and sleep are `halt`, weight updates `weight_session`, generation the
native request. POST /update_weights, which several dialects share, stands in `weights`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tlt_server import __version__
from tlt_server.config import nearest
from tlt_server.errors import (
    ChannelBroken,
    Conflict,
    DeadlineExceeded,
    EngineFailed,
    Forbidden,
    InvalidRequest,
    NotFound,
    Overloaded,
    Poisoned,
    PushFailed,
    QueueFull,
    QueueTimeout,
    StorageFailed,
    Unavailable,
    WeightsRefused,
)
from tlt_server.frontend.dialects.openai.logprobs import Speller, scored_prompt
from tlt_server.frontend.dialects.openai.phrases import scored, whole
from tlt_server.frontend.dialects.openai.replies import CachedTokens, OpenAIUsage
from tlt_server.frontend.dialects.operate import Status
from tlt_server.frontend.dialects.vllm_rl.replies import (
    CheckReply,
    IsPaused,
    IsSleeping,
    Load,
    Paused,
    Results,
    ServerVersion,
    Succeeded,
    TokensChoice,
    TokensReply,
    Told,
    WeightInfo,
    WorldSize,
    fault,
)
from tlt_server.frontend.dialects.vllm_rl.requests import (
    AbortFields,
    FinishFields,
    NoBody,
    RpcFields,
    StartFields,
    TokensRequest,
    VersionFields,
)
from tlt_server.frontend.dialects.weights import PushReply, outcome
from tlt_server.frontend.generation.choice import FinishedChoice
from tlt_server.frontend.generation.delivery import reply
from tlt_server.frontend.generation.generation import Generation
from tlt_server.frontend.generation.items import FailedItem, FinishedItem
from tlt_server.frontend.generation.pieces import Pieces
from tlt_server.frontend.generation.validation import Words
from tlt_server.frontend.http.auth import caller_of
from tlt_server.frontend.http.bodies import read_object
from tlt_server.frontend.http.endpoints import Endpoint, Parameter
from tlt_server.frontend.http.fields import Model, checked, shown, without_nulls
from tlt_server.frontend.http.queries import flag, word, words
from tlt_server.frontend.http.replies import json_response
from tlt_server.frontend.link.admission import Demand
from tlt_server.frontend.service import Service
from tlt_server.frontend.weights.checker import CheckFields
from tlt_server.frontend.weights.session import Selector
from tlt_server.frontend.weights.transfer import BroadcasterFields, InitFields
from tlt_server.records import InFlight, Memory

MODES: dict[str, InFlight] = {"abort": "abort", "wait": "drain", "keep": "continue"}
LEVELS: dict[str, list[Memory]] = {"1": ["kv_cache"], "2": ["weights", "kv_cache"]}
TAGS: dict[str, list[Memory]] = {"weights": ["weights"], "kv_cache": ["kv_cache"], "scheduling": []}
RPC = ("skyrl_start_weight_update", "update_weights_nccl", "skyrl_finish_weight_update")
WORDS = Words("token_ids", "token_ids", "", "sampling_params.")


def routes(service: Service) -> list[Endpoint]:
    engine, halt, session = service.engine, service.engine.pauses, service.session
    pieces = Pieces(service.text)

    async def pause(request: Request) -> Response:
        """Stop generating until POST /resume.

        `abort` ends what runs with what it has, `wait` answers when it has ended; both refuse new
        requests with 503. `keep` freezes what runs with its KV, and new requests wait.
        """
        await _read(NoBody, request)
        mode = word(request, "mode", MODES, "abort")
        clear = flag(request, "clear_cache", default=True)
        await halt.pause(MODES[mode], refuse=mode != "keep", clear_cache=clear and mode != "keep")
        return json_response(Paused("paused"))

    async def resume(request: Request) -> Response:
        """Go on with what was frozen or has waited, and take new requests."""
        await _read(NoBody, request)
        await halt.resume()
        return json_response(Paused("resumed"))

    async def is_paused(request: Request) -> Response:
        """Whether a pause holds."""
        return json_response(IsPaused(halt.paused))

    async def abort_requests(request: Request) -> Response:
        """End requests with what they have; their replies say finish_reason "abort". Another key's,
        and all of them, need operate.
        """
        engine.check_running()
        names = (await _read(AbortFields, request)).request_ids
        service.abort(names or None, caller_of(request))
        return json_response(
            Told(f"aborted {'what was named and open' if names else 'all that was open'}")
        )

    async def world_size(request: Request) -> Response:
        """How many ranks of this server take weights."""
        return json_response(WorldSize())

    async def init_transfer(request: Request) -> Response:
        """Join the trainer's process group, as the rank `rank_offset`. Answers once all ranks are
        there.
        """
        await service.transfer.join((await _read(InitFields, request)).init_info)
        return json_response(Told("Weight transfer initialized"))

    async def init_broadcaster(request: Request) -> Response:
        """Join the trainer's process group, in which `rank_offset` counts servers only. Answers
        once all ranks are there.
        """
        await service.transfer.join((await _read(BroadcasterFields, request)).info())
        return json_response(Told("Weight transfer initialized"))

    async def start(request: Request) -> Response:
        """Begin an update of the target's weights: what is pushed until POST /finish_weight_update
        becomes live then.
        """
        return await _start(request, "target")

    async def start_draft(request: Request) -> Response:
        """Begin an update of the drafter's weights, as POST /start_weight_update does for the
        target.
        """
        return await _start(request, "draft")

    async def _start(request: Request, selector: Selector) -> Response:
        await _begin(await _read(StartFields, request), selector)
        return json_response(Told("Weight update started"))

    async def _begin(asked: StartFields, selector: Selector) -> None:
        engine.check_running()
        if not asked.is_checkpoint_format:
            raise InvalidRequest(
                "is_checkpoint_format is false; tensors are taken under their checkpoint's names only: send them so"
            )
        await session.begin(selector)

    async def finish(request: Request) -> Response:
        """Make what was pushed since the update was begun live, in one commit between two steps."""
        asked = await _read(FinishFields, request)
        return outcome(await session.end(asked.weight_version or ""))

    async def collective_rpc(request: Request) -> Response:
        """Begin, go on with or finish a weight update under the names by which SkyRL calls it; no
        other method is called.
        """
        asked = await _read(RpcFields, request)
        match asked.method:
            case "skyrl_start_weight_update":
                await _begin(checked(StartFields, asked.arguments), "target")
            case "update_weights_nccl":
                with session.pushing() as update:
                    engine.check_running()
                    await service.transfer.push(update, asked.arguments)
            case "skyrl_finish_weight_update":
                await session.end(checked(FinishFields, asked.arguments).weight_version or "")
            case unknown:
                raise InvalidRequest(
                    f"method is {shown(unknown)}{nearest(unknown, RPC)}; this server calls {', '.join(RPC)} only"
                )
        return json_response(Results([None]))

    async def rename(request: Request) -> Response:
        """Name the version that the open update pushes, or else the one that is live; its content
        stays.
        """
        await session.rename((await _read(VersionFields, request)).new_version)
        return json_response(Told("Weight version updated"))

    async def info(request: Request) -> Response:
        """The versions that are live."""
        state = (await session.look()).state
        return json_response(WeightInfo(state.target, state.drafter))

    async def check(request: Request) -> Response:
        """Checksums of everything live, computed anew; or compare them with a baseline."""
        sums, mismatches = await service.checker.check(await _read(CheckFields, request))
        if mismatches is None:
            return json_response(CheckReply(checksums=sums))
        return json_response(CheckReply(match=not mismatches, mismatches=mismatches))

    async def reset_prefix_cache(request: Request) -> Response:
        """Forget every cached prefix; what runs goes on with its own KV, which then serves nobody
        else.
        """
        await _read(NoBody, request)
        await halt.clear_cache(unless_held=False)
        return json_response(Succeeded())

    async def sleep(request: Request) -> Response:
        """Give memory back: level 1 the KV, level 2 the weights of target and drafter too. New
        requests get 503 until all is awake.

        `abort` ends what runs, `wait` lets it end first, `keep` drops its KV: it goes on with the
        same tokens after POST /wake_up.
        """
        await _read(NoBody, request)
        level, mode = word(request, "level", LEVELS, "1"), word(request, "mode", MODES, "abort")
        await halt.sleep(LEVELS[level], "recompute" if mode == "keep" else MODES[mode])
        return json_response(Succeeded())

    async def wake_up(request: Request) -> Response:
        """Take memory again, weights bit for bit as they were; without tags all of it."""
        await _read(NoBody, request)
        asked = words(request, "tags", TAGS)
        await halt.wake([memory for tag in asked or TAGS for memory in TAGS[tag]])
        return json_response(Succeeded())

    async def is_sleeping(request: Request) -> Response:
        """Whether any memory is given back."""
        return json_response(IsSleeping(bool(halt.asleep)))

    async def generate(request: Request) -> Response:
        """Generate from token ids; unknown fields are ignored, null is the same as absent."""
        engine.check_available()
        content = without_nulls(await read_object(await request.body(), "token_ids"))
        engine.check_room(Demand(sequences=1))  # the body may have taken its time
        asked = checked(TokensRequest, content)
        if asked.model not in ("", service.config.served_model_name, str(service.config.model)):
            served = service.config.served_model_name
            raise NotFound(
                f"model is {asked.model[:100]!r}; this server serves {served!r}: name that one, or none"
            )
        assert engine.info is not None
        generation = service.start(
            await service.validator.batch(asked.native(), engine.info, WORDS),
            caller_of(request).name,
        )
        return await reply(request, _whole(asked, generation), generation)

    async def _whole(asked: TokensRequest, generation: Generation) -> Response:
        async for event in generation.events():
            if isinstance(event, FailedItem):
                raise event.error
            if isinstance(event, FinishedItem):
                result = event
        speller, params = Speller(pieces, as_ids=True), asked.sampling_params

        def choice(of: FinishedChoice) -> TokensChoice:
            logprobs = speller.chat(scored(whole(of))) if params.logprobs is not None else None
            return TokensChoice(
                of.index,
                of.token_ids,
                of.finish_reason,
                of.stop_reason,
                logprobs,
                of.weight_versions,
            )

        prompt = result.choices[0].prompt_logprobs
        told = (
            None
            if not isinstance(prompt, list)
            else speller.prompt(scored_prompt(asked.token_ids, prompt, params.prompt_logprobs or 0))
        )
        tokens = sum(len(of.token_ids) for of in result.choices)
        usage = OpenAIUsage(
            result.prompt_tokens,
            tokens,
            result.prompt_tokens + tokens,
            CachedTokens(result.cached_tokens),
        )
        return json_response(
            TokensReply(result.id, [choice(of) for of in result.choices], told, usage)
        )

    async def load(request: Request) -> Response:
        """How much is open."""
        return json_response(Load(len(engine)))

    async def version(request: Request) -> Response:
        """The server's version."""
        return json_response(ServerVersion(__version__))

    async def ping(request: Request) -> Response:
        """Whether this process works and its engine has not gone."""
        engine.check_alive()
        return json_response(Status())

    gone = (EngineFailed, Unavailable)
    joins = (Forbidden, Conflict, WeightsRefused, ChannelBroken, *gone)
    mode = Parameter(
        "mode",
        "query",
        "what becomes of what runs",
        {"type": "string", "enum": [*MODES], "default": "abort"},
    )
    clear = Parameter(
        "clear_cache",
        "query",
        "forget cached prefixes too; without effect for keep",
        {"type": "boolean", "default": True},
    )
    level = Parameter(
        "level",
        "query",
        "what is given back",
        {"type": "string", "enum": [*LEVELS], "default": "1"},
    )
    tags = Parameter(
        "tags",
        "query",
        "what to take again; absent: everything",
        {"type": "array", "items": {"type": "string", "enum": [*TAGS]}},
    )
    dp = Parameter("include_dp", "query", "accepted and without effect: there is one replica")
    get, post = (
        partial(Endpoint, "GET", error_shape=fault),
        partial(Endpoint, "POST", error_shape=fault, optional_body=True),
    )
    return [
        post(
            "/pause",
            pause,
            needs="operate",
            parameters=(mode, clear),
            takes=NoBody,
            gives=Paused,
            raises=gone,
        ),
        post("/resume", resume, needs="operate", takes=NoBody, gives=Paused, raises=gone),
        get("/is_paused", is_paused, needs="any", gives=IsPaused),
        post(
            "/abort_requests",
            abort_requests,
            needs="data",
            takes=AbortFields,
            gives=Told,
            raises=(Forbidden, *gone),
        ),
        get("/get_world_size", world_size, needs="any", parameters=(dp,), gives=WorldSize),
        Endpoint(
            "POST",
            "/init_weight_transfer_engine",
            init_transfer,
            needs="push-weights",
            takes=InitFields,
            gives=Told,
            error_shape=fault,
            raises=joins,
            example={
                "init_info": {
                    "master_address": "127.0.0.1",
                    "master_port": 29500,
                    "rank_offset": 1,
                    "world_size": 2,
                    "backend": "gloo",
                }
            },
        ),
        Endpoint(
            "POST",
            "/init_broadcaster",
            init_broadcaster,
            needs="push-weights",
            takes=BroadcasterFields,
            gives=Told,
            error_shape=fault,
            raises=joins,
            example={
                "host": "127.0.0.1",
                "port": 29500,
                "rank_offset": 0,
                "inference_world_size": 1,
                "backend": "gloo",
            },
        ),
        post(
            "/start_weight_update",
            start,
            needs="push-weights",
            takes=StartFields,
            gives=Told,
            raises=(NotFound, Conflict, *gone),
        ),
        post(
            "/start_draft_weight_update",
            start_draft,
            needs="push-weights",
            takes=StartFields,
            gives=Told,
            raises=(NotFound, Conflict, *gone),
        ),
        post(
            "/finish_weight_update",
            finish,
            needs="push-weights",
            takes=FinishFields,
            gives=PushReply,
            raises=(NotFound, Conflict, WeightsRefused, PushFailed, *gone),
        ),
        Endpoint(
            "POST",
            "/collective_rpc",
            collective_rpc,
            needs="push-weights",
            takes=RpcFields,
            example={"method": "skyrl_start_weight_update"},
            gives=Results,
            raises=(NotFound, Conflict, WeightsRefused, ChannelBroken, PushFailed, *gone),
            error_shape=fault,
        ),
        Endpoint(
            "POST",
            "/update_weight_version",
            rename,
            needs="push-weights",
            takes=VersionFields,
            example={"new_version": "step-8"},
            gives=Told,
            raises=(Conflict, PushFailed, *gone),
            error_shape=fault,
        ),
        get("/weight_info", info, needs="any", gives=WeightInfo, raises=gone),
        post(
            "/weight_checker",
            check,
            needs="push-weights",
            takes=CheckFields,
            gives=CheckReply,
            raises=(Conflict, *gone),
        ),
        post(
            "/reset_prefix_cache",
            reset_prefix_cache,
            needs="operate",
            takes=NoBody,
            gives=Succeeded,
            raises=gone,
        ),
        post(
            "/sleep",
            sleep,
            needs="operate",
            parameters=(level, mode),
            takes=NoBody,
            gives=Succeeded,
            raises=(Conflict, StorageFailed, *gone),
        ),
        post(
            "/wake_up",
            wake_up,
            needs="operate",
            parameters=(tags,),
            takes=NoBody,
            gives=Succeeded,
            raises=gone,
        ),
        get("/is_sleeping", is_sleeping, needs="any", gives=IsSleeping),
        Endpoint(
            "POST",
            "/inference/v1/generate",
            generate,
            needs="data",
            takes=TokensRequest,
            gives=TokensReply,
            error_shape=fault,
            example={
                "token_ids": [17, 18, 19],
                "sampling_params": {"max_tokens": 8, "logprobs": 1, "seed": 7},
            },
            raises=(
                NotFound,
                QueueFull,
                Overloaded,
                QueueTimeout,
                DeadlineExceeded,
                EngineFailed,
                Poisoned,
                Unavailable,
            ),
        ),
        get("/load", load, needs="any", gives=Load),
        get("/version", version, needs="any", gives=ServerVersion),
        get("/ping", ping, needs="open", gives=Status, raises=(Unavailable,)),
    ]


async def _read(model: type[Model], request: Request) -> Model:
    """No body at all is an empty object."""
    body = await request.body()
    content: dict[str, Any] = (
        await read_object(body, next(iter(model.model_fields), "nothing")) if body else {}
    )
    return checked(model, without_nulls(content))
