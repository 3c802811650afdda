"""Routes that follow, fetch, list and delete rollouts: batches that `POST /generate` detached or
started under an Idempotency-Key.

None of them needs the engine, so results can be fetched while it restarts.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from tlt_client.wire import Progress, RolloutList, RolloutReply, RolloutStatus, RolloutSummary
from tlt_server.errors import NotFound
from tlt_server.frontend.dialects.replies.whole import EndedItems
from tlt_server.frontend.generation.delivery import while_connected
from tlt_server.frontend.http.auth import caller_of
from tlt_server.frontend.http.endpoints import Routes
from tlt_server.frontend.http.keys import Caller
from tlt_server.frontend.http.replies import sliced_response
from tlt_server.frontend.rollouts.rollout import KeptRollout
from tlt_server.frontend.service import Service

MAX_WAIT_S = 60.0
RolloutId = Annotated[str, "the id in the reply to the request that started the rollout"]
WaitForEnd = Annotated[
    float, "the longest time to wait for the end of the rollout", Meta(ge=0, le=MAX_WAIT_S)
]


ROUTES = Routes()


@ROUTES.get("/rollouts", needs="data")
async def every(service: Service, caller: Caller) -> RolloutList:
    """List the kept rollouts that this key started, oldest first, without prompts and results.

    A key with the scope operate gets all of them.
    """
    return RolloutList(
        [
            RolloutSummary(
                rollout.header.id,
                rollout.status,
                rollout.header.detached,
                rollout.header.created_s,
                rollout.done_s,
                rollout.bytes,
                _progress(rollout),
                rollout.header.owner,
            )
            for rollout in service.rollouts
            if caller.sees(rollout.header.owner)
        ]
    )


@ROUTES.get("/rollouts/{id}", needs="data", raises=(NotFound,))
async def fetch(
    service: Service, request: Request, id: RolloutId, wait_s: WaitForEnd = 0
) -> Annotated[Response, RolloutReply]:
    """Fetch the results of a rollout so far, and whether it is done.

    With `?wait_s=`, at most 60, the reply comes when it is done or that time is up. Fetching
    changes nothing, so it may be repeated. Once a finished rollout was fetched, it may be forgotten
    early to make room for new ones.
    """
    caller = caller_of(request)
    rollout = service.rollouts.find(id, caller)

    async def when_done() -> Response:
        if wait_s and rollout.done_s is None:
            await rollout.wait(wait_s)
        turn = service.generations.share.of(caller.name)
        ended = await EndedItems.of(await service.rollouts.results(rollout), turn)
        results = ended.content(service, ended.by_id)
        return sliced_response(
            {
                "id": rollout.header.id,
                "status": rollout.status,
                "progress": _progress(rollout),
                **results,
            },
            turn,
        )

    return await while_connected(request, when_done())


@ROUTES.delete("/rollouts/{id}", needs="data", changes=True, raises=(NotFound,))
async def delete(service: Service, id: RolloutId, caller: Caller) -> RolloutStatus:
    """Abort the sequences of a rollout that still run, and forget it."""
    rollout = service.rollouts.find(id, caller)
    service.rollouts.delete(rollout)
    return RolloutStatus(rollout.header.id, "deleted")


def _progress(rollout: KeptRollout) -> Progress:
    items_ended, tokens = rollout.count()
    return Progress(len(rollout.item_ids), items_ended, tokens)
