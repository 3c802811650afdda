"""The served drafter, its recorded training sequences, and its trainer: `GET /drafter` shows them,
`GET /drafter/samples` returns the recorded sequences, and an operator's orders are posts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Annotated

from msgspec import Meta
from starlette.responses import Response, StreamingResponse

from tlt_server.errors import Conflict, InvalidRequest, ModelError, PushFailed, StorageFailed
from tlt_server.frontend.dialects.replies.drafter import (
    BufferState,
    DrafterState,
    ExportReply,
    ServedDrafter,
    TrainerStatus,
    trainer_status,
)
from tlt_server.frontend.dialects.replies.errors import PushReply, outcome
from tlt_server.frontend.http.endpoints import Routes
from tlt_server.frontend.http.fields import Strict
from tlt_server.frontend.link.trainer import TrainerLink
from tlt_server.frontend.service import Service
from tlt_server.models.draft_networks import Layout
from tlt_server.speculation.drafters import DRAFTERS, architecture_in, weights_directory
from tlt_server.wire.records import Cycle
from tlt_server.wire.training import MAX_PAUSE_S, TrainerState, trained_for

MAX_NUMBER = 2**63 - 1
LIMIT, MAX_LIMIT = 256, 4096  # sequences of a reply
SLICE_BYTES = 2**18
After = Annotated[
    int,
    "number of the last sequence of the reply before, from its header X-Samples-After; 0: from the "
    "oldest one",
    Meta(ge=0, le=MAX_NUMBER),
]
AtMost = Annotated[
    int,
    "the most sequences of the reply, which ends earlier where they have 8 MiB together",
    Meta(ge=1, le=MAX_LIMIT),
]


ROUTES = Routes(needs="operate", engine_fails=False)


class ExportFields(Strict, frozen=True, kw_only=True):
    name: Annotated[
        str,
        "of the new directory, below `exports` in the state directory",
        Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"),
    ]
    layout: Annotated[Layout, "as of tlt drafter export"] = "eagle3"


class TrainingPause(Strict, frozen=True, kw_only=True):
    for_s: Annotated[
        Annotated[float, Meta(ge=0, le=MAX_PAUSE_S)] | None,
        "seconds after which training goes on by itself, counted from the last such call; 0 ends "
        "such a pause at once; null: until POST /drafter/resume",
    ] = None


@ROUTES.get("/drafter", link=True)
async def look(service: Service) -> DrafterState:
    """Show the drafters with their acceptance of late, and what is recorded to train one."""
    info, trainer = service.running(), service.trainer
    return DrafterState(
        target_version=info.weight_version,
        drafters=[_served(service, name) for name in info.drafters],
        training=service.config.drafter_training,
        trainer=trainer_status(trainer) if trainer else None,
        buffer=_buffer(service, trainer) if trainer else None,
    )


@ROUTES.get(
    "/drafter/samples",
    text="application/octet-stream",
    headers={
        "X-Samples-After": "What `after` must be to go on.",
        "X-Samples-Left": "Sequences that come after these now.",
    },
    link=True,
    raises=(Conflict, StorageFailed),
)
async def samples(service: Service, after: After = 0, limit: AtMost = LIMIT) -> Response:
    """Return recorded sequences, prompts included, as a segment file: oldest first, at most `limit`
    after the number `after`.

    Only whole sequences are in it. Sequences that the bounds of the buffer remove meanwhile are
    left out, and so are those that are in memory only.
    """
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
            f"after is {after}, and the newest sequence is {found.newest}: earlier ones were "
            "removed; start again with 0"
        )
    headers = {
        "x-samples-after": str(found.after),
        "x-samples-left": str(found.left),
        "content-length": str(len(found.data)),
    }
    media = "application/octet-stream"
    return StreamingResponse(_slices(found.data), media_type=media, headers=headers)


@ROUTES.post("/drafter/train", link=True, raises=(Conflict,))
async def train(service: Service) -> TrainerStatus:
    """Begin a round of training now, without waiting for more sequences; with `drafter_training`
    idle once the engine is idle. 409 while a round is on its way, in a pause, and where nothing can
    be trained.
    """
    trainer = service.spot_trainer()
    state = trainer.spot.state
    if state == TrainerState.PAUSED:
        raise Conflict(
            f"training is paused ({trainer.spot.reason}); POST /drafter/resume, then ask again"
        )
    if state == TrainerState.FAILED:
        raise Conflict(f"{trainer.spot.reason}; push another drafter, then ask again")
    if state != TrainerState.IDLE:
        raise Conflict(
            f"a round is in progress ({state}); wait for its end, which GET /drafter shows"
        )
    await trainer.order("train")
    return trainer_status(trainer)


@ROUTES.post("/drafter/pause", link=True, raises=(Conflict,))
async def pause(service: Service, asked: TrainingPause) -> TrainerStatus:
    """Train and adopt nothing until POST /drafter/resume, or for a time; what is half done is kept.
    A drafter that is being pushed has been taken or refused before the answer comes. With `for_s`
    nothing changes where the trainer is paused already, by an operator or after a fault.
    """
    trainer = service.spot_trainer()
    await (trainer.order("pause") if asked.for_s is None else trainer.hold(asked.for_s))
    return trainer_status(trainer)


@ROUTES.post("/drafter/resume", raises=(Conflict,))
async def resume(service: Service) -> TrainerStatus:
    """Go on after a pause, an operator's or one after a fault. A repeated call changes nothing."""
    trainer = service.spot_trainer()
    await trainer.order("resume")
    return trainer_status(trainer)


@ROUTES.post("/drafter/rollback", engine_fails=True, raises=(Conflict, PushFailed))
async def rollback(service: Service) -> PushReply:
    """Make the drafter before the live one live again; the target stays. Training goes on from it,
    so pause the trainer first to keep it.
    """
    return outcome(await service.adoption.roll_back())


@ROUTES.post("/drafter/export", engine_fails=True, raises=(Conflict, PushFailed, StorageFailed))
async def export(service: Service, asked: ExportFields) -> ExportReply:
    """Write the live drafter below the state directory, in the layout of another engine. It is read
    back and compared before it is there.
    """
    found = await service.exports.write(asked.name, asked.layout)
    return ExportReply(
        directory=str(found.directory), layout=asked.layout, version=found.version, said=found.said
    )


async def _slices(data: bytes) -> AsyncIterator[bytes]:
    for at in range(0, len(data), SLICE_BYTES):
        yield data[at : at + SLICE_BYTES]


def _served(service: Service, name: str) -> ServedDrafter:
    engine, has_network = service.engine, DRAFTERS[name].needs_weights
    directory = weights_directory(service.config.drafter) if has_network else None
    version = service.info.drafter_version if has_network else None
    cycles = [
        cycle
        for cycle in engine.replica.drafted
        if cycle.strategy.drafter == name and _drafted_for_all(cycle)
    ]
    return ServedDrafter(
        name=name,
        architecture=architecture_in(directory) if directory else None,
        weight_version=version,
        trained_for=trained_for(version) if version else None,
        # The canary watches drafters with a network, of which only one can be loaded.
        resting=has_network and engine.replica.gauges.get("drafters_resting", 0.0) > 0,
        steps=len(cycles),
        accept_length=_accept_length(cycles),
        accepted_at_depth=accepted_at_depth(cycles),
    )


def accepted_at_depth(cycles: Iterable[Cycle]) -> list[float]:
    """Return for each depth from 1 on the share of requests that accepted at least as many drafts,
    among cycles that drafted that deep.
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
    """Return True if every request of the cycle took drafts."""
    context = cycle.context
    return bool(cycle.accepted) and context.taking(cycle.strategy.drafter) >= context.decoding


def _buffer(service: Service, trainer: TrainerLink) -> BufferState:
    report, gauges = trainer.report, service.engine.replica.gauges
    return BufferState(
        sequences=report.sequences,
        tokens=report.tokens,
        bytes=report.size,
        tokens_by_version=report.tokens_by_version,
        feature_tokens=report.feature_tokens,
        feature_bytes=report.feature_size,
        directory=str(trainer.files.directory) if trainer.files else None,
        disk_error=report.disk_error,
        offered=int(gauges.get("samples_offered", 0)),
        dropped=int(gauges.get("samples_dropped", 0)),
        refused=report.refused,
        refusals=[*trainer.refusals],
    )
