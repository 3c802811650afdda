"""Labels of versions: a trainer that starts again and counts from 1 is taken, and no two contents
have one name.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.gathered import PARTS, engine, live_as, part, results, root, settings
from tests.engine.pushing import Pushable
from tlt_server.engine.settings import EngineSettings
from tlt_server.wire.commands import CommitWeights, LeaveGroup, NameWeights
from tlt_server.wire.events import WeightReport
from tlt_server.wire.labels import label_of

__all__ = ["engine", "root", "settings"]  # fixtures


def ask(engine: Pushable, command: CommitWeights | NameWeights | LeaveGroup) -> WeightReport:
    engine.engine.send(command)
    return engine.report(command.id)


def test_label_is_last_push_and_each_content_keeps_its_name(
    settings: EngineSettings, engine: Pushable, root: Path
) -> None:
    first = engine.push(root / "new1", "1", labelled=True)
    second = engine.push(root / "new2", "1", labelled=True)
    assert (first.result, first.version) == ("committed", "1")
    assert second.result == "committed" and second.version != "1"
    assert label_of(second.version) == "1" and second.state.target == second.version
    assert engine.checksums() == live_as(settings, root / "new2")
    assert engine.push(root / "new2", "1", labelled=True).result == "unchanged"
    back = engine.push(root / "new1", "1", labelled=True)
    assert (back.result, back.version) == ("committed", "1"), "the same content, the same name"
    strict = engine.push(root / "new2", "1")
    assert strict.result == "conflict", "a version of the native dialect means one content"
    assert engine.roll_back(second.version).result == "rolled_back"


def test_update_end_and_active_version_can_be_labelled(engine: Pushable, root: Path) -> None:
    engine.push(root / "new1", "1", labelled=True)
    engine.push(root / "new2", "", labelled=True, session="s", commit=False)
    ended = ask(engine, CommitWeights("c", name="1", session="s"))
    assert ended.result == "committed" and ended.version != "1" and label_of(ended.version) == "1"
    again = ask(engine, NameWeights("n", "1"))
    assert (again.result, again.version) == ("unchanged", ended.version), "it has that label"
    initial = ask(engine, NameWeights("i", "initial"))
    assert initial.result == "named" and label_of(initial.version) == "initial"
    assert initial.version == initial.state.target != "initial"


def test_restarted_trainer_may_send_parts_in_a_different_order(
    settings: EngineSettings, engine: Pushable, root: Path
) -> None:
    asked = {"version": "1", "labelled": True, "group": "g"}
    assert results(engine, root, "new1", range(2), **asked) == ["gathering"] * 2
    assert ask(engine, LeaveGroup("l", "g")).result == "left", "as joining it again does"
    order = [*reversed(range(PARTS))]
    found = [part(engine, root, "new2", number, **asked).result for number in order]  # type: ignore[arg-type]
    assert found == ["gathering", "gathering", "committed"]
    assert engine.checksums() == live_as(settings, root / "new2")


@pytest.fixture
def few_names(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("tlt_server.weights.versions.REMEMBERED", 2)
    yield


def test_forgotten_label_still_gets_a_new_version_name(
    engine: Pushable, root: Path, few_names: None
) -> None:
    for version, place in (("1", "new1"), ("2", "new2"), ("3", "new1"), ("4", "new2")):
        assert engine.push(root / place, version).result == "committed"
    late = engine.push(root / "new1", "1", labelled=True)
    assert late.result == "committed" and late.version != "1" and label_of(late.version) == "1"


def test_version_names_without_a_digest_are_their_own_labels() -> None:
    for name in ("1", "step~7", "a~0123456789a", "~0123456789ab", "a~0123456789AB"):
        assert label_of(name) == name
    assert label_of("a~b~0123456789ab") == "a~b"


def test_staged_push_is_aborted_by_the_version_it_was_sent_with(
    engine: Pushable, root: Path
) -> None:
    engine.push(root / "new1", "1", labelled=True)
    staged = engine.push(root / "new2", "1", labelled=True, commit=False)
    assert staged.version.startswith("1~")
    assert engine.abort("2").result == "not_found"
    assert engine.abort("1").result == "aborted"
