"""One report of a fleet from those of its replicas, for every command."""

from __future__ import annotations

import re
from typing import Any, get_args

import msgspec
import pytest

from tlt_server.errors import Conflict, EngineFailed, NotFound, TltError, Unavailable
from tlt_server.frontend.link.merging import digests, merged
from tlt_server.wire.commands import (
    AbortWeights,
    ClearCache,
    CommitWeights,
    ControlCommand,
    HandOver,
    JoinGroup,
    LeaveGroup,
    LookAtWeights,
    Manifest,
    NameWeights,
    Pause,
    PushWeights,
    ReadWeights,
    Resume,
    RollbackWeights,
    SetPolicy,
    Sleep,
    UnloadAdapter,
    WakeUp,
    WeightCommand,
)
from tlt_server.wire.events import ControlReport, WeightReport, WeightState

WEIGHTS: list[Any] = [
    PushWeights("c", Manifest(version="v1", commit=False)),
    CommitWeights("c", "v1"),
    AbortWeights("c"),
    NameWeights("c", "v1"),
    ReadWeights("c", "x", 1),
    HandOver("c", "d", "e"),
    RollbackWeights("c"),
    UnloadAdapter("c", "math"),
    LookAtWeights("c", checksums=True),
    JoinGroup("c", "g", "gloo", "127.0.0.1", 1, 1, 4),
    LeaveGroup("c", "g"),
]
CONTROL: list[Any] = [
    Pause("c"),
    Resume("c"),
    Sleep("c", ["weights"]),
    WakeUp("c", ["weights"]),
    ClearCache("c"),
    SetPolicy("off", id="c"),
]
ENDED = (AbortWeights, UnloadAdapter)
SUMS = {"a": "mix64:1", "b": "mix64:2"}


def report(id: str = "r", **fields: Any) -> WeightReport:
    return WeightReport(id=id, **({"state": WeightState(target="v0"), "checksums": SUMS} | fields))


def made(command: Any, id: str) -> Any:
    return ControlReport(id, None, "ready") if command in CONTROL else report(id, result="done")


def refused(command: Any, error: TltError) -> Any:
    told = (error.code, error.message)
    if command in CONTROL:
        return ControlReport("r", told)
    return report(result=error.code, error=told, checksums={})


def test_every_command_has_a_case() -> None:
    assert {type(each) for each in WEIGHTS} == {*get_args(WeightCommand)}
    assert {type(each) for each in CONTROL} == {*get_args(ControlCommand), SetPolicy}


@pytest.mark.parametrize("command", WEIGHTS + CONTROL, ids=lambda each: type(each).__name__)
def test_answers_of_all_become_one(command: Any) -> None:
    answers = {name: made(command, name) for name in "abc"}
    found = merged(command, answers)
    assert found.id == "c" and found.error is None
    assert msgspec.structs.replace(found, id="a") == answers["a"]


@pytest.mark.parametrize("error", [Conflict("it is busy"), NotFound("it is not there")])
@pytest.mark.parametrize("command", WEIGHTS + CONTROL, ids=lambda each: type(each).__name__)
def test_one_refusal_counts_as_the_command_says(command: Any, error: TltError) -> None:
    answers = {"a": made(command, "1"), "b": refused(command, error), "c": made(command, "3")}
    found = merged(command, answers)
    if isinstance(command, ENDED) and isinstance(error, NotFound):
        assert found.error is None and found.lagging == {"b": error.message}
    else:
        assert found.error == (error.code, f"replica b: {error.message}")
        assert command in CONTROL or found.result == error.code


@pytest.mark.parametrize("command", WEIGHTS + CONTROL, ids=lambda each: type(each).__name__)
def test_refusal_by_all_is_that_of_the_first(command: Any) -> None:
    answers = {name: refused(command, NotFound(f"not at {name}")) for name in "ab"}
    assert merged(command, answers).error == ("not_found", "replica a: not at a")


@pytest.mark.parametrize("command", WEIGHTS + CONTROL, ids=lambda each: type(each).__name__)
def test_lost_replica_counts_only_if_all_are_lost(command: Any) -> None:
    lost = Unavailable("its link is gone", retry_after_s=3)
    found = merged(command, {"a": lost, "b": made(command, "2")})
    assert found.error is None
    assert command in CONTROL or found.lagging == {"a": "its link is gone"}
    both = {"a": refused(command, Conflict("no")), "b": lost}
    assert merged(command, both).error == ("conflict", "replica a: no")
    with pytest.raises(Unavailable, match="replica a: its link is gone") as caught:
        merged(command, {"a": lost, "b": EngineFailed("it died")})
    assert caught.value.retry_after_s == 3


PUSH, LOOK = WEIGHTS[0], WEIGHTS[8]


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        ({"result": "staged"}, {"result": "gathering"}, "gathering and another staged"),
        ({"version": "v1"}, {"version": "v2"}, "'v2' and another's 'v1'"),
        ({}, {"checksums": SUMS | {"b": "mix64:9"}}, "'b' has checksum mix64:9 .* mix64:2"),
        ({}, {"checksums": {"a": "mix64:1"}}, "'b' has checksum none"),
        ({"checksums": {}}, {}, "'a' has checksum mix64:1 and another's none"),
    ],
)
@pytest.mark.parametrize("command", [PUSH, LOOK])
def test_different_weights_are_refused(command: Any, one: Any, other: Any, said: str) -> None:
    found = merged(command, {"a": report(**one), "b": report(**other)})
    assert found.error is not None and found.error[0] == "weights_refused" == found.result
    assert re.search(said, found.error[1]) and found.error[1].startswith("replica b: ")


def test_live_drafters_may_differ_and_staged_ones_may_not() -> None:
    answers = {
        name: report(checksums={"a": "mix64:1", "draft.a": f"mix64:{name}"}) for name in "12"
    }
    assert merged(LOOK, answers).error is None
    assert merged(PUSH, answers).error is not None


def test_same_content_under_a_taken_label_has_one_name() -> None:
    apart = "v1~0123456789ab"
    for versions in (("v1", apart), (apart, "v1")):
        answers = {str(i): report(version=version) for i, version in enumerate(versions)}
        assert merged(PUSH, answers).version == apart


def test_fleet_is_unchanged_only_if_all_replicas_are() -> None:
    same, new = report(result="unchanged"), report(result="staged", phases={"read": 1.0})
    slow = report(result="staged", phases={"read": 2.0, "check": 1.0}, pause_ms=4.0)
    assert merged(PUSH, {"a": same, "b": same}).result == "unchanged"
    found = merged(PUSH, {"a": same, "b": new, "c": slow})
    assert (found.result, found.phases, found.pause_ms) == ("staged", {"read": 2.0}, 4.0)


def test_state_is_what_all_replicas_share() -> None:
    one = WeightState(
        target="v1",
        previous={"target": "v0", "drafter": "d0"},
        spooled=True,
        groups=["g", "h"],
        adapters={"math": "1", "code": "1"},
        sockets="/run/a",
    )
    other = WeightState(
        target="v1",
        previous={"target": "v0"},
        open={"version": "v2", "role": "target", "state": "staging"},
        groups=["h"],
        adapters={"math": "1", "code": "2"},
        quarantined={"drafter": "why"},
    )
    assert merged(LOOK, {"a": report(state=one), "b": report(state=other)}).state == WeightState(
        target="v1",
        previous={"target": "v0"},
        open={"version": "v2", "role": "target", "state": "staging"},
        quarantined={"drafter": "why"},
        groups=["h"],
        adapters={"math": "1"},
    )


def test_digest_of_a_role_is_one_in_every_report() -> None:
    target, drafter = {"a": "mix64:1"}, {"a": "mix64:2"}
    both = digests(report(role="all", checksums=target | {"draft.a": "mix64:2"}))
    assert both["target"] == digests(report(role="target", checksums=target))["target"]
    assert both["drafter"] == digests(report(role="drafter", checksums=drafter))["drafter"]
    assert both["target"] != both["drafter"]
