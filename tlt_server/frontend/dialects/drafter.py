"""The drafter that is served and what is recorded to train it: `GET /drafter` shows both,
`GET /drafter/samples` hands the recorded sequences out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Annotated, Literal

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from tlt_server.errors import Conflict, InvalidRequest, ModelError, StorageFailed, Unavailable
from tlt_server.frontend.http.endpoints import Parameter, Routes
from tlt_server.frontend.http.queries import count
from tlt_server.frontend.http.replies import json_response
from tlt_server.frontend.link.trainer import TrainerLink, TrainerPhase
from tlt_server.frontend.service import Service
from tlt_server.records import Cycle
from tlt_server.speculation.drafters import DRAFTERS, architecture_in, weights_directory

MAX_NUMBER = 2**63 - 1
LIMIT, MAX_LIMIT = 256, 4096  # sequences of a reply
SLICE_BYTES = 2**18
AFTER = Parameter(
    "after",
    "query",
    "number of the last sequence of the reply before, from its header X-Samples-After; 0: from the "
    "oldest one",
    {"type": "integer", "minimum": 0, "maximum": MAX_NUMBER, "default": 0},
)
AT_MOST = Parameter(
    "limit",
    "query",
    "the most sequences of the reply, which ends earlier where they have 8 MiB together",
    {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT, "default": LIMIT},
)


class ServedDrafter(Struct, frozen=True, kw_only=True):
    """A drafter that is loaded, with what the target has accepted of it of late."""

    name: Annotated[str, Meta(description="as strategies name it")]
    architecture: Annotated[
        str | None,
        Meta(description="of its network, as its config.json says; null: it has no network"),
    ]
    weight_version: Annotated[
        str | None, Meta(description="version of its weights; null: it has no network")
    ]
    resting: Annotated[
        bool,
        Meta(description="whether it drafts nothing, as a change of weights collapsed acceptance"),
    ]
    steps: Annotated[
        int,
        Meta(
            description="steps that the next figures are of: the last ones in which all requests "
            "took its drafts"
        ),
    ]
    accept_length: Annotated[
        float | None,
        Meta(description="mean tokens per request and such step; null: there is no such step"),
    ]
    accepted_at_depth: Annotated[
        list[float],
        Meta(
            description="share of requests whose first 1, 2, ... drafts were accepted, of the "
            "steps that drafted as deep"
        ),
    ]


class BufferState(Struct, frozen=True, kw_only=True):
    """The sequences that are kept to train the drafter."""

    sequences: Annotated[int, Meta(description="sequences that are kept")]
    tokens: Annotated[int, Meta(description="their tokens, with those of prompts")]
    bytes: Annotated[int, Meta(description="their size")]
    tokens_by_version: Annotated[
        dict[str, int],
        Meta(description="the target's weight version -> output tokens; `older`: all before these"),
    ]
    directory: Annotated[
        str | None, Meta(description="where segment files are; null: sequences are in memory only")
    ]
    disk_error: Annotated[
        str, Meta(description="why sequences are not written to files now; else empty")
    ]
    offered: Annotated[int, Meta(description="sequences recorded since the engine has started")]
    dropped: Annotated[
        int, Meta(description="those of them that were lost as the trainer was slow or away")
    ]
    refused: Annotated[
        int, Meta(description="sequences and files that did not fit, since the trainer has started")
    ]
    refusals: Annotated[list[str], Meta(description="the last reasons for that, newest last")]


class DrafterState(Struct, frozen=True, kw_only=True):
    """The drafters that are served, and what is recorded to train one."""

    target_version: Annotated[str, Meta(description="the target's weight version that is live")]
    drafters: Annotated[list[ServedDrafter], Meta(description="drafters that are loaded")]
    training: Annotated[str, Meta(description="the setting drafter_training")]
    trainer: Annotated[
        TrainerPhase | Literal["off"],
        Meta(description="the trainer process; failed: it ended and is started again soon"),
    ]
    trainer_error: Annotated[
        str,
        Meta(
            description="how the last trainer process ended, whose own words are in the standard "
            "error of the server; empty: none has"
        ),
    ]
    trainer_restarts: Annotated[int, Meta(description="trainer processes after the first one")]
    buffer: Annotated[BufferState | None, Meta(description="null: nothing is recorded")]


ROUTES = Routes()


@ROUTES.get("/drafter", needs="operate", gives=DrafterState, raises=(Unavailable,))
async def look(service: Service, request: Request) -> Response:
    """Show the drafters with their acceptance of late, and what is recorded to train one."""
    service.engine.check_running()
    info, trainer = service.engine.info, service.trainer
    assert info is not None
    state = DrafterState(
        target_version=info.weight_version,
        drafters=[_served(service, name) for name in info.drafters],
        training=service.config.drafter_training,
        trainer=trainer.phase if trainer else "off",
        trainer_error=trainer.error if trainer else "",
        trainer_restarts=trainer.restarts if trainer else 0,
        buffer=_buffer(service, trainer) if trainer else None,
    )
    return json_response(state)


@ROUTES.get(
    "/drafter/samples",
    needs="operate",
    parameters=(AFTER, AT_MOST),
    text="application/octet-stream",
    headers={
        "X-Samples-After": "What `after` must be to go on.",
        "X-Samples-Left": "Sequences that come after these now.",
    },
    raises=(InvalidRequest, Conflict, StorageFailed),
)
async def samples(service: Service, request: Request) -> Response:
    """Return recorded sequences, prompts included, as a segment file: oldest first, at most `limit`
    after the number `after`.

    Only whole sequences are in it. Sequences that the bounds of the buffer remove meanwhile are
    left out, and so are those that are in memory only.
    """
    after = count(request, "after", 0, MAX_NUMBER, 0)
    limit = count(request, "limit", 1, MAX_LIMIT, LIMIT)
    trainer = service.trainer
    if trainer is None:
        raise Conflict(
            "drafter_training is off, so nothing is recorded; restart the server with "
            "--drafter-training idle and --state-dir"
        )
    if trainer.files is None:
        raise Conflict(
            "sequences are kept in memory only, and this reads files; restart the server with "
            "--state-dir"
        )
    try:
        found = await trainer.excerpt(trainer.files, after, limit)
    except (OSError, ModelError) as error:
        raise StorageFailed(f"recorded sequences cannot be read: {error}") from None
    if after > found.newest:
        raise InvalidRequest(
            f"after is {after}, and the newest sequence is {found.newest}: those before were "
            "removed; begin again with 0"
        )
    headers = {
        "x-samples-after": str(found.after),
        "x-samples-left": str(found.left),
        "content-length": str(len(found.data)),
    }
    media = "application/octet-stream"
    return StreamingResponse(_slices(found.data), media_type=media, headers=headers)


async def _slices(data: bytes) -> AsyncIterator[bytes]:
    for at in range(0, len(data), SLICE_BYTES):
        yield data[at : at + SLICE_BYTES]


def _served(service: Service, name: str) -> ServedDrafter:
    engine, has_network = service.engine, DRAFTERS[name].needs_weights
    assert engine.info is not None
    directory = weights_directory(service.config.drafter) if has_network else None
    cycles = [
        cycle
        for cycle in engine.drafted
        if cycle.strategy.drafter == name and _drafted_for_all(cycle)
    ]
    return ServedDrafter(
        name=name,
        architecture=architecture_in(directory) if directory else None,
        weight_version=engine.info.drafter_version if has_network else None,
        # The canary watches drafters with a network, of which only one can be loaded.
        resting=has_network and engine.gauges.get("drafters_resting", 0.0) > 0,
        steps=len(cycles),
        accept_length=_accept_length(cycles),
        accepted_at_depth=accepted_at_depth(cycles),
    )


def accepted_at_depth(cycles: Iterable[Cycle]) -> list[float]:
    """Return for each depth, from 1 on, the share of requests that accepted as many drafts, of the
    cycles that drafted as deep.
    """
    requests, reached = Counter[int](), Counter[int]()  # by depth
    for cycle in cycles:
        deepest, accepted = cycle.strategy.depth, Counter(cycle.accepted)
        as_deep = sum(number for count, number in accepted.items() if count > deepest)
        for depth in range(deepest, 0, -1):
            as_deep += accepted[depth]
            reached[depth] += as_deep
            requests[depth] += len(cycle.accepted)
    return [reached[depth] / requests[depth] for depth in sorted(requests)]


def _accept_length(cycles: Sequence[Cycle]) -> float | None:
    """Return the mean tokens per request and cycle."""
    requests = sum(len(cycle.accepted) for cycle in cycles)
    return 1 + sum(sum(cycle.accepted) for cycle in cycles) / requests if requests else None


def _drafted_for_all(cycle: Cycle) -> bool:
    """Tell whether every request of the cycle took drafts."""
    context = cycle.context
    return bool(cycle.accepted) and context.taking(cycle.strategy.drafter) >= context.decoding


def _buffer(service: Service, trainer: TrainerLink) -> BufferState:
    report, gauges = trainer.report, service.engine.gauges
    return BufferState(
        sequences=report.sequences,
        tokens=report.tokens,
        bytes=report.size,
        tokens_by_version=report.tokens_by_version,
        directory=str(trainer.files.directory) if trainer.files else None,
        disk_error=report.disk_error,
        offered=int(gauges.get("samples_offered", 0)),
        dropped=int(gauges.get("samples_dropped", 0)),
        refused=report.refused,
        refusals=[*trainer.refusals],
    )
