"""Routes that describe this server, its health and its load, as clients of SGLang ask for them.

GET /server_info, which several dialects share, is in `dialects.operate`.
"""

from __future__ import annotations

import time
from typing import Annotated

from starlette.requests import Request
from starlette.responses import Response

from tlt_server import __version__
from tlt_server.errors import Unavailable
from tlt_server.frontend.dialects.replies.errors import UNFINISHED, failure_naming
from tlt_server.frontend.dialects.replies.server_info import ServerInfo, server_info
from tlt_server.frontend.dialects.replies.status import Status
from tlt_server.frontend.dialects.sglang.replies import Loads, LoadsReply, ModelInfo, VersionReply
from tlt_server.frontend.generation.delivery import reply
from tlt_server.frontend.generation.generation import Generation
from tlt_server.frontend.generation.items import FailedItem, FinishedItem
from tlt_server.frontend.generation.requests import ItemFields, NativeRequest, SamplingFields
from tlt_server.frontend.http.auth import caller_of
from tlt_server.frontend.http.endpoints import Routes
from tlt_server.frontend.http.keys import Caller
from tlt_server.frontend.http.replies import json_response
from tlt_server.frontend.reading.asking import unless
from tlt_server.frontend.service import Service
from tlt_server.wire.events import EngineInfo
from tlt_server.wire.labels import label_of
from tlt_server.wire.packed import PackedIds

ROUTES = Routes()


@ROUTES.get("/get_server_info", needs="any")
async def about(service: Service, caller: Caller) -> ServerInfo:
    """Describe this server, as GET /server_info does."""
    return server_info(service, caller)


@ROUTES.get("/health_generate", needs="data", raises=UNFINISHED)
async def health_generate(service: Service, request: Request) -> Annotated[Response, Status]:
    """Check that a token can be made, by making one.

    The status is 503 while generation is paused or asleep, also if that starts meanwhile.
    """
    service.engine.check_available()
    service.engine.pauses.check_generating()
    one = NativeRequest(
        requests=[ItemFields(token_ids=PackedIds.of([0]), seed=0, sd=False, train=False)],
        sampling=SamplingFields(max_tokens=1, ignore_eos=True),
    )
    caller = caller_of(request)
    generation = await service.start(
        await service.validator.batch(one, _info(service), caller), caller.name
    )
    return await reply(
        request, unless(service.engine.pauses.until_halted(), _made(generation)), generation
    )


async def _made(generation: Generation) -> Response:
    async for event in generation.events():
        if isinstance(event, FailedItem):
            raise event.error
        if isinstance(event, FinishedItem) and event.choices[0].token_ids:
            return json_response(Status())
    raise Unavailable("the token was aborted before it was made; ask again", retry_after_s=1)


@ROUTES.get("/model_info", needs="any")
@ROUTES.get("/get_model_info", needs="any")
async def model_info(service: Service, caller: Caller) -> ModelInfo:
    """Name the served model and the version of its weights."""
    model = server_info(service, caller).model_path
    return ModelInfo(
        model_path=model,
        tokenizer_path=model,
        weight_version=label_of(_info(service).weight_version),
        served_model_name=service.config.served_model_name,
    )


@ROUTES.get("/get_weight_version", needs="any")
async def weight_version(service: Service) -> VersionReply:
    """Name the version of the target that is live."""
    return VersionReply(label_of(_info(service).weight_version))


@ROUTES.get("/v1/loads", needs="any", error_shape=failure_naming(()))
async def loads(
    service: Service,
    include: Annotated[str, "accepted and without effect: the reply is small"] = "",
) -> LoadsReply:
    """Count the sequences that are open, run and wait, and the KV positions in use."""
    own, gauges = _info(service), service.engine.gauges
    positions = own.pages * own.page_size
    used = positions - round(gauges.get("pages_free", own.pages)) * own.page_size
    one = Loads(
        num_running_reqs=round(gauges.get("running", 0)),
        num_waiting_reqs=round(gauges.get("waiting", 0)),
        num_total_reqs=len(service.engine),
        num_used_tokens=used,
        max_total_num_tokens=positions,
        max_running_requests=own.max_running,
        token_usage=used / positions,
    )
    return LoadsReply(timestamp=time.time(), version=__version__, loads=[one])


def _info(service: Service) -> EngineInfo:
    service.engine.check_running()
    assert service.engine.info is not None
    return service.engine.info
