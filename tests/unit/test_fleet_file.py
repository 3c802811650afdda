"""The record of a fleet: what a crash leaves of it, and what each replica owes afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tlt_server.errors import Conflict, EngineFailed, StartupError
from tlt_server.frontend.link.catching_up import owed
from tlt_server.frontend.link.fleet_file import FLEET, Committed, FleetFile, FleetRecord
from tlt_server.wire.commands import (
    AbortWeights,
    CommitWeights,
    Manifest,
    NameWeights,
    PushWeights,
    RollbackWeights,
    UnloadAdapter,
    WeightCommand,
)
from tlt_server.wire.events import WeightState

V0, V1, D0 = Committed("v0", "0"), Committed("v1", "1"), Committed("d0", "d")
RECORD = FleetRecord(fleet="f", epoch=1, roles={"target": V0, "drafter": D0})
BEFORE = WeightState(target="v0", drafter="d0")
DIGESTS = {"target": "0", "drafter": "d"}


def pushed(**new: Committed) -> FleetRecord:
    return RECORD.committing({"target": V1, **new})


def no_room(*given: object) -> int:
    raise OSError("no room")


# -- the file --------------------------------------------------------------------------------------


def test_file_keeps_the_id_and_counts_its_openings(tmp_path: Path) -> None:
    first = FleetFile(tmp_path / "state")
    record = pushed().committing({"adapter": Committed("m1", "m")}, "math")
    first.commit(replace(record, fleet=first.record.fleet))
    second = FleetFile(tmp_path / "state")
    assert second.record == replace(first.record, epoch=2) and len(second.record.fleet) == 16
    assert FleetFile(tmp_path / "other").record.fleet != second.record.fleet
    assert {path.name for path in (tmp_path / "state").iterdir()} == {FLEET}
    assert (tmp_path / "state" / FLEET).stat().st_mode & 0o777 == 0o600


def test_gateway_that_was_stopped_writes_nothing_over_the_next_ones(tmp_path: Path) -> None:
    ended: list[EngineFailed] = []
    first = FleetFile(tmp_path, ended.append)
    second = FleetFile(tmp_path)
    second.commit(replace(second.record, roles={"target": V1}))
    with pytest.raises(EngineFailed, match="has epoch 2, this gateway's is 1, .* ask that one"):
        first.commit(replace(first.record, roles={"target": V0}))
    assert len(ended) == 1 and not first.record.roles
    assert FleetFile(tmp_path).record.roles == {"target": V1}


@pytest.mark.parametrize("at", ["open", "fsync", "replace"])
def test_crash_before_the_rename_leaves_the_record_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    file = FleetFile(tmp_path)
    file.commit(replace(RECORD, fleet=file.record.fleet))
    before = file.record

    with monkeypatch.context() as patched:
        if at == "replace":
            patched.setattr(Path, at, no_room)
        else:
            patched.setattr(f"tlt_server.process.private.os.{at}", no_room)
        with pytest.raises(OSError, match="no room"):
            file.commit(pushed())
    assert file.record == before
    assert FleetFile(tmp_path).record == replace(before, epoch=before.epoch + 1)


def test_crash_after_the_rename_leaves_the_new_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = FleetFile(tmp_path)
    rename = Path.replace

    def killed(self: Path, target: Path) -> Path:
        rename(self, target)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            file.commit(pushed())
    assert FleetFile(tmp_path).record.roles["target"] == V1


@pytest.mark.parametrize(
    "content", [b"", b"{", b'{"fleet": "f"}', b'{"fleet": "f", "epoch": "1"}', b"\xff" * 9]
)
def test_damaged_file_refuses_the_start(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FLEET).write_bytes(content)
    with pytest.raises(StartupError, match="is damaged .* another --state-dir and push again"):
        FleetFile(tmp_path)
    assert (tmp_path / FLEET).read_bytes() == content


# -- the record ------------------------------------------------------------------------------------


def test_rollback_undoes_what_the_last_push_changed() -> None:
    both = pushed(drafter=Committed("v1", "e"))
    assert both.to_roll_back("", None) == {"target": V0, "drafter": D0}
    assert both.to_roll_back("", "drafter") == {"drafter": D0} == both.to_roll_back("d0", None)
    assert pushed().to_roll_back("", None) == {"target": V0} == pushed().to_roll_back("v0", None)
    assert pushed().to_roll_back("v1", None) == {}
    back = pushed().rolling_back({"target": V0})
    assert back.roles == RECORD.roles
    for record in (back, RECORD):
        with pytest.raises(Conflict, match="keeps no version for a rollback; .* push"):
            record.to_roll_back("", None)
    with pytest.raises(Conflict, match="keeps 'v0' for a rollback, not 'v7'"):
        pushed().to_roll_back("v7", None)


def test_repeated_commit_keeps_the_version_before() -> None:
    again = pushed().committing({"target": V1})
    assert again == pushed()


def test_adapter_leaves_the_roles_alone() -> None:
    loaded = RECORD.committing({"adapter": Committed("m1", "m")}, "math")
    assert loaded.adapters == {"math": Committed("m1", "m")}
    assert loaded.without("math") == RECORD


# -- what a replica owes ---------------------------------------------------------------------------

FETCH = Manifest(channel="peer", path="http://a http://b", key="k")


CONTENT = {
    ("target", "v1"): "1",
    ("drafter", "d0"): "d",
    ("drafter", "v1"): "e",
    ("adapter", "m2"): "m",
}


def fetched(role: Any, version: str, **fields: Any) -> PushWeights:
    made = replace(FETCH, role=role, version=version, digest=CONTENT[role, version], **fields)
    return PushWeights("", made)


def opened(state: str, version: str = "v1", role: str = "target") -> dict[str, str]:
    return {"version": version, "role": role, "state": state}


@pytest.mark.parametrize(
    ("record", "state", "digests", "steps"),
    [
        # nothing is on its way
        (RECORD, BEFORE, DIGESTS, []),
        # staged at the replica, and the gateway died before the rename, or after it
        (RECORD, replace(BEFORE, open=opened("staged")), DIGESTS, [AbortWeights("")]),
        (pushed(), replace(BEFORE, open=opened("staged")), DIGESTS, [CommitWeights("", "v1")]),
        # the rename came, and the replica has made the push live, or undone it, or neither
        (pushed(), replace(BEFORE, target="v1"), DIGESTS | {"target": "1"}, []),
        (
            RECORD,
            replace(BEFORE, target="v1", previous={"target": "v0"}),
            DIGESTS | {"target": "1"},
            [RollbackWeights("", "v0", role="target")],
        ),
        (pushed(), BEFORE, DIGESTS, [fetched("target", "v1")]),
        # it stages another version, or its push is not whole
        (
            pushed(),
            replace(BEFORE, open=opened("staged", "v2")),
            DIGESTS,
            [AbortWeights(""), fetched("target", "v1")],
        ),
        (
            pushed(),
            replace(BEFORE, open=opened("gathering")),
            DIGESTS,
            [AbortWeights(""), fetched("target", "v1")],
        ),
        (
            pushed(),
            replace(BEFORE, open=opened("staged", role="drafter")),
            DIGESTS,
            [AbortWeights(""), fetched("target", "v1")],
        ),
        # the version has its name, and other content
        (
            pushed(),
            replace(BEFORE, target="v1"),
            DIGESTS | {"target": "2"},
            [fetched("target", "v1")],
        ),
        (
            pushed(),
            replace(BEFORE, target="v1"),
            {},
            [fetched("target", "v1"), fetched("drafter", "d0")],
        ),
        # the content has another name
        (
            pushed().naming("best"),
            replace(BEFORE, target="v1"),
            DIGESTS | {"target": "1"},
            [NameWeights("", "best")],
        ),
        # it was named with its commit
        (
            RECORD.committing({"target": Committed("step-9", "1", staged="v1")}),
            replace(BEFORE, open=opened("staged", "v1~0123456789ab")),
            DIGESTS,
            [CommitWeights("", "v1~0123456789ab", "step-9")],
        ),
        # both models came in one push
        (
            pushed(drafter=Committed("v1", "e")),
            replace(BEFORE, open=opened("staged", role="all")),
            DIGESTS,
            [CommitWeights("", "v1")],
        ),
        (
            pushed(drafter=Committed("v1", "e")),
            BEFORE,
            DIGESTS,
            [fetched("target", "v1"), fetched("drafter", "v1")],
        ),
    ],
)
def test_replica_owes_what_it_lacks(
    record: FleetRecord, state: WeightState, digests: Any, steps: list[WeightCommand]
) -> None:
    assert owed(record, state, digests, FETCH) == steps


@pytest.mark.parametrize(
    ("state", "steps"),
    [
        ({"adapters": {"math": "m2"}}, []),
        ({"adapters": {"math": "m1"}}, [fetched("adapter", "m2", adapter="math")]),
        ({}, [fetched("adapter", "m2", adapter="math")]),
        ({"open": opened("staged", "m2", "adapter")}, [CommitWeights("", "m2")]),
        ({"adapters": {"math": "m2", "code": "c1"}}, [UnloadAdapter("", "code", "abort")]),
    ],
)
def test_replica_owes_adapters_by_name(state: Any, steps: list[WeightCommand]) -> None:
    record = RECORD.committing({"adapter": Committed("m2", "m")}, "math")
    assert owed(record, replace(BEFORE, **state), DIGESTS, FETCH) == steps


def test_new_fleet_has_the_weights_of_its_first_replica() -> None:
    state = replace(BEFORE, adapters={"math": "m1"})
    record = FleetRecord(fleet="f", epoch=1).beginning(state, DIGESTS)
    assert record.roles == RECORD.roles and owed(record, state, DIGESTS, FETCH) == []
    without = FleetRecord(fleet="f", epoch=1).beginning(WeightState(target="v0"), {"target": "0"})
    assert [*without.roles] == ["target"]


INITIAL = {"target": Committed("initial", "0"), "drafter": Committed("initial", "d")}
STARTED = WeightState(target="initial")  # without a drafter


def begun(tmp_path: Path, state: WeightState = STARTED, **before: Any) -> FleetRecord:
    """Return the record after the first replica of a gateway that finds another one's record."""
    first = FleetFile(tmp_path)
    first.commit(replace(first.record, roles=INITIAL, **before))
    file = FleetFile(tmp_path)
    file.begin(state, {"target": "9"})
    file.begin(STARTED, {"target": "8"})  # the next replica
    return file.record


def test_fleet_without_pushes_starts_with_other_models(tmp_path: Path) -> None:
    assert begun(tmp_path).roles == {"target": Committed("initial", "9")}
    static = {"math": Committed("initial", "")}
    assert begun(tmp_path, adapters=static).adapters == {}


@pytest.mark.parametrize(
    ("state", "before"),
    [
        (STARTED, {"previous": {"target": V1}}),
        (STARTED, {"adapters": {"math": Committed("m1", "m")}}),
        (replace(STARTED, target="v1"), {}),  # it missed a rollback
        (replace(STARTED, adapters={"math": "m1"}), {}),  # it missed that one was unloaded
    ],
)
def test_fleet_with_pushes_keeps_its_record(tmp_path: Path, state: Any, before: Any) -> None:
    assert begun(tmp_path, state, **before).roles == INITIAL


def test_fleet_begins_once_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = FleetFile(tmp_path)
    first.commit(replace(first.record, roles=INITIAL))
    file = FleetFile(tmp_path)
    with monkeypatch.context() as patched, pytest.raises(OSError, match="no room"):
        patched.setattr("tlt_server.frontend.link.fleet_file.replace_file", no_room)
        file.begin(STARTED, {"target": "9"})
    file.begin(STARTED, {"target": "9"})
    assert file.record.roles == {"target": Committed("initial", "9")}


def test_replica_without_a_drafter_owes_none() -> None:
    state = WeightState(target="v0")
    assert owed(RECORD, state, {"target": "0"}, FETCH) == []
