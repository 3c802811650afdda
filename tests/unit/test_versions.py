"""Conditions under which a new epoch of the engine may serve, and a version is lost."""

from __future__ import annotations

import msgspec
import pytest

from tests.frontend.fake_engine import INFO
from tlt_server.errors import Conflict, Unavailable
from tlt_server.frontend.link.standing import WantedVersions
from tlt_server.wire.events import WeightReport, WeightState


def info(target: str, drafter: str = "d0", **fields: object) -> object:
    return msgspec.structs.replace(INFO, weight_version=target, drafter_version=drafter, **fields)


def report(result: str, role: str, target: str, drafter: str = "d0") -> WeightReport:
    return WeightReport(
        id="w",
        result=result,
        role=role,
        version=target,
        state=WeightState(target=target, drafter=drafter),
    )


def begun(*lives: object, unanswered: bool = False) -> WantedVersions:
    versions = WantedVersions()
    for life in lives:
        versions.begin(life, unanswered=unanswered)  # type: ignore[arg-type]
    return versions


def test_epoch_holding_the_previous_versions_may_serve() -> None:
    begun(info("v0"), info("v0")).check()


def test_lost_commit_blocks_until_its_role_is_committed() -> None:
    versions = begun(info("v0"))
    versions.reported(report("committed", "target", "v1"))
    for _ in range(2):  # a life that ends before the push changes nothing
        versions.begin(info("v0"), unanswered=False)  # type: ignore[arg-type]
        with pytest.raises(
            Unavailable,
            match="'v1' of the target is lost.*holds 'v0'.*--state-dir.*POST /update_weights",
        ) as caught:
            versions.check()
        assert caught.value.retry_after_s
    versions.reported(report("looked", "", "v0"))
    versions.reported(report("weights_refused", "target", "v0"))
    versions.reported(report("committed", "drafter", "v0", "d1"))
    with pytest.raises(Unavailable):
        versions.check()
    versions.reported(report("committed", "target", "v2", "d1"))
    versions.check()
    versions.begin(info("v2", "d1"), unanswered=False)  # type: ignore[arg-type]
    versions.check()


def test_name_given_by_a_gateway_restores_a_lost_version() -> None:
    versions = begun(info("v0"))
    versions.check_name()
    versions.reported(report("named", "target", "v1"))
    versions.begin(info("v0"), unanswered=False)  # type: ignore[arg-type]
    with pytest.raises(Conflict, match="cannot be named.*'v1' of the target is lost"):
        versions.check_name()
    versions.reported(report("named", "target", "v1"))
    versions.check()


def test_lost_drafter_blocks_until_a_drafter_is_pushed() -> None:
    versions = begun(info("v0"))
    versions.reported(report("committed", "all", "v1", "v1"))
    versions.begin(info("v1", "d0"), unanswered=False)  # type: ignore[arg-type]
    assert list(versions.lost) == ["drafter"]
    versions.reported(report("committed", "target", "v2", "d0"))
    assert list(versions.lost) == ["drafter"]
    versions.reported(report("committed", "all", "v3", "v3"))
    versions.check()


def test_rollback_changes_the_version_a_restart_must_hold() -> None:
    versions = begun(info("v0"))
    versions.reported(report("committed", "target", "v1"))
    versions.reported(report("rolled_back", "target", "v0"))
    versions.begin(info("v0"), unanswered=False)  # type: ignore[arg-type]
    versions.check()


def test_spool_decides_only_if_a_weight_command_was_open() -> None:
    begun(
        info("v0"), info("v1", spooled=True), unanswered=True
    ).check()  # committed, and the answer was lost
    assert begun(info("v1", spooled=True), info("v0", spooled=True)).lost, (
        "the state directory was emptied"
    )
    assert begun(info("v1"), info("v0"), unanswered=True).lost, (
        "without one no push can have committed v0"
    )


def test_version_lost_by_the_engine_may_be_restored() -> None:
    versions = begun(
        info(
            "v0",
            spooled=True,
            lost={"target": "the committed weight version 'v7' of the target is lost: truncated"},
        )
    )
    with pytest.raises(Unavailable, match="v7.*truncated"):
        versions.check()
    versions.begin(info("v7", spooled=True), unanswered=False)  # type: ignore[arg-type]
    versions.check()


def test_push_of_an_already_active_version_ends_the_wait() -> None:
    versions = begun(info("v0"), info("v1"))  # committed, but the engine died before it said so
    assert list(versions.lost) == ["target"]
    versions.reported(report("unchanged", "target", "v1"))
    versions.check()
    versions.begin(info("v1"), unanswered=False)  # type: ignore[arg-type]
    versions.check()


def test_self_trained_drafter_is_not_waited_for() -> None:
    versions = begun(info("v0"))
    versions.reported(report("committed", "drafter", "v0", "drafter-v0-1"))
    versions.own.add("drafter-v0-1")
    versions.begin(info("v0"), unanswered=False)  # type: ignore[arg-type]
    versions.check()
    versions.reported(report("committed", "drafter", "v0", "pushed"))
    versions.begin(info("v0"), unanswered=False)  # type: ignore[arg-type]
    with pytest.raises(Unavailable, match="'pushed' of the drafter is lost"):
        versions.check()
