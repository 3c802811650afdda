"""One report for a command that all replicas of a fleet have got. Pure: no I/O, no clock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from msgspec.structs import replace

from tlt_client.channels import DRAFTER_PREFIX, split
from tlt_client.channels.checksums import digest
from tlt_server.errors import NotFound, TltError, WeightsRefused, from_code
from tlt_server.frontend.link.members import Order
from tlt_server.wire.commands import AbortWeights, LookAtWeights, PushWeights, UnloadAdapter
from tlt_server.wire.events import ControlReport, WeightReport, WeightState
from tlt_server.wire.labels import label_of

Report = TypeVar("Report", WeightReport, ControlReport)
Answers = Mapping[str, Report | TltError]  # by replica; an error: it is gone


def merged(command: Order, answers: Answers[Report]) -> Report:
    """Return one report for all replicas: the first refusal, naming its replica, or what all did.
    Replicas that are gone do not count, unless all are; then raise the first error.
    """
    gone = {name: each for name, each in answers.items() if isinstance(each, TltError)}
    reports = {name: each for name, each in answers.items() if not isinstance(each, TltError)}
    done = {name: each for name, each in reports.items() if each.error is None}
    ends = isinstance(command, AbortWeights | UnloadAdapter) and done
    excused = NotFound.code if ends else ""  # a replica may have had nothing to end
    for name, report in reports.items():
        if report.error is not None and report.error[0] != excused:
            return _refusal(command, report, from_code(*report.error), name)
    if not done:
        name, error = next(iter(gone.items()))
        raise type(error)(f"replica {name}: {error.message}", retry_after_s=error.retry_after_s)
    lagging = {name: each.message for name, each in gone.items()}
    lagging |= {name: each.error[1] for name, each in reports.items() if each.error is not None}
    return _together(command, done, lagging)


def _refusal(command: Order, report: Report, error: TltError, name: str) -> Report:
    said = {"result": error.code} if isinstance(report, WeightReport) else {}
    message = f"replica {name}: {error.message}"
    return replace(report, id=command.id, error=(error.code, message), **said)


def _together(command: Order, done: Mapping[str, Report], lagging: Mapping[str, str]) -> Report:
    first = next(iter(done.values()))
    if isinstance(first, ControlReport):
        return replace(first, id=command.id)
    reports: Mapping[str, WeightReport] = done
    for name, report in reports.items():
        if why := _difference(command, first, report):
            return _refusal(command, report, WeightsRefused(f"{why}; push it again"), name)
    first = next((each for each in reports.values() if each.result != "unchanged"), first)
    states = [report.state for report in reports.values()]
    return replace(
        first,
        id=command.id,
        version=name_of([report.version for report in reports.values()]),
        state=_state(first.state, states),
        phases={
            phase: max(report.phases.get(phase, 0.0) for report in reports.values())
            for phase in first.phases
        },
        pause_ms=max(report.pause_ms for report in reports.values()),
        lagging=dict(lagging),
    )


def _difference(command: Order, one: WeightReport, other: WeightReport) -> str:
    """Return in which way two replicas have staged, or hold, other weights; empty: in none.
    Drafters that are live may differ, since each replica trains its own.
    """
    if not isinstance(command, PushWeights | LookAtWeights):
        return ""
    if (one.result == "gathering") != (other.result == "gathering"):
        return f"it is {other.result} and another {one.result}, so they miss other tensors"
    if label_of(one.version) != label_of(other.version):
        return f"its version is {other.version!r} and another's {one.version!r}"
    for name in sorted(one.checksums.keys() | other.checksums.keys()):
        sums = other.checksums.get(name, "none"), one.checksums.get(name, "none")
        own = isinstance(command, LookAtWeights) and name.startswith(DRAFTER_PREFIX)
        if sums[0] != sums[1] and not own:
            return f"its {name!r} has checksum {sums[0]} and another's {sums[1]}"
    return ""


def name_of(versions: Iterable[str]) -> str:
    """Return the one name for content that replicas know by a label, or by the label and its
    digest, since some have other content of that label.
    """
    return max(versions, key=lambda version: version != label_of(version))


def _state(first: WeightState, states: Sequence[WeightState]) -> WeightState:
    """Return what is true of all replicas."""
    return replace(
        first,
        previous=_shared([state.previous for state in states]),
        open=next((state.open for state in states if state.open), {}),
        spooled=all(state.spooled for state in states),
        quarantined={role: why for state in states for role, why in state.quarantined.items()},
        groups=[name for name in first.groups if all(name in state.groups for state in states)],
        adapters=_shared([state.adapters for state in states]),
        sockets="",
    )


def _shared(maps: Sequence[Mapping[str, str]]) -> dict[str, str]:
    return {
        key: value for key, value in maps[0].items() if all(each.get(key) == value for each in maps)
    }


def digests(report: WeightReport) -> dict[str, str]:
    """Return the digest of each role's weights in a report."""
    roles = split(report.checksums, report.role)
    return {
        role: digest({own: report.checksums[sent] for own, sent in names.items()})
        for role, names in roles.items()
    }
