"""The reply to a push, a commit, an abort or a rollback of weights."""

from __future__ import annotations

from typing import Annotated, Literal, cast

from msgspec import Struct

from tlt_server.wire.events import WeightReport
from tlt_server.wire.labels import label_of

PushState = Literal[
    "committed", "staged", "gathering", "unchanged", "aborted", "named", "rolled_back", "unloaded"
]


class PushReply(Struct, frozen=True):
    """The outcome of a push, a commit, an abort or a rollback."""

    state: Annotated[
        PushState,
        "the outcome; gathering: further calls bring the missing tensors; unchanged: the same "
        "push, or the version to be committed, was live before, or nothing was pushed",
    ]
    version: Annotated[str, "name of the version pushed"]
    role: Annotated[str, "what was pushed"]
    weight_version: Annotated[str, "the target's version that is live now"]
    checksums: Annotated[dict[str, str], "mix64 of the values of each tensor pushed, by name"]
    phases_s: Annotated[dict[str, float], "duration of the push, by phase, in seconds"]
    pause_ms: Annotated[float, "how long the commit kept the loop from stepping"]


def outcome(report: WeightReport, *, labelled: bool = False) -> PushReply:
    """Return the reply that describes the report of the engine. `labelled`: it calls versions by
    their labels.
    """
    called = label_of if labelled else str
    return PushReply(
        cast(PushState, report.result),
        called(report.version),
        report.role,
        called(report.state.target),
        report.checksums,
        report.phases,
        report.pause_ms,
    )
