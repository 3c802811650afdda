"""A restarted trainer goes on from the checkpoint of the drafter that it follows, and no other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.engine.pushing import Pushable
from tests.engine.weight_cases import root, settings
from tlt_server.engine.settings import EngineSettings
from tlt_server.samples.segments import SegmentHeader
from tlt_server.trainer.process.work import DrafterWork
from tlt_server.trainer.recording.buffer import BufferBounds, SampleBuffer
from tlt_server.trainer.recording.state_store import StateStore
from tlt_server.trainer.replaying.handed import Handed, digest_of
from tlt_server.wire.commands import HandOver
from tlt_server.wire.training import HandedOver, TrainerSettings

__all__ = ["root", "settings"]  # fixtures


def new_work(settings: EngineSettings, place: Path) -> DrafterWork:
    buffer = SampleBuffer(None, SegmentHeader(1, 40, "m", ""), BufferBounds(100, 1000))
    given = TrainerSettings(
        str(place / "ring"),
        str(settings.model),
        "",
        *(100, 1000, 0),
        work=str(place),
        checkpoints=str(place.parent / "checkpoints"),
    )
    return DrafterWork(given, "cpu", buffer, StateStore(0, 0))


def install(work: DrafterWork, engine: Pushable, place: Path) -> Handed:
    """Hand over the active versions."""
    id, drafter = f"out-{place.name}", engine.settings.drafter
    assert drafter is not None
    engine.engine.send(HandOver(id, str(place), drafter))
    state = engine.report(id).state
    work.install(
        HandedOver(directory=str(place), target=state.target, drafter=state.drafter, longest=2**20)
    )
    assert work._handed is not None
    return work._handed


def steps_of_a_new_process(settings: EngineSettings, place: Path, done: int) -> int:
    """Return the steps that a trainer of this engine's drafter begins with; it leaves `done`."""
    work = new_work(settings, place)
    handed = install(work, Pushable(settings), place / "handed")
    assert handed.drafter_version == "initial"
    trainer = work._build(handed)
    found, trainer.state.step = trainer.state.step, done
    work.release()
    return found


def test_checkpoint_of_a_different_drafter_is_not_resumed(
    settings: EngineSettings, root: Path, tmp_path: Path
) -> None:
    places = [tmp_path / str(number) for number in range(4)]
    for place in places:
        place.mkdir()
    other = replace(settings, drafter=str(root / "new-drafter"))
    assert steps_of_a_new_process(settings, places[0], 5) == 0
    assert steps_of_a_new_process(settings, places[1], 7) == 5
    assert steps_of_a_new_process(other, places[2], 3) == 0
    assert steps_of_a_new_process(other, places[3], 3) == 3


@pytest.mark.parametrize("asleep", [False, True])
def test_optimizer_continues_after_a_push_of_the_last_candidate(
    settings: EngineSettings, root: Path, tmp_path: Path, asleep: bool
) -> None:
    (tmp_path / "work").mkdir()
    engine, work = Pushable(settings), new_work(settings, tmp_path / "work")
    handed = install(work, engine, tmp_path / "work" / "handed-1")
    trainer = work._build(handed)
    trainer.state.step = 5
    trainer.state.mean_P.fill_(0.25)
    work._candidate = digest_of(handed.replayed(root / "new-drafter"))
    if asleep:
        work.release()
    pushed = engine.push(root / "new", "step-9", role="all", drafter_path=str(root / "new-drafter"))
    assert pushed.state.drafter == "step-9"
    handed = install(work, engine, tmp_path / "work" / "handed-2")
    trainer = work._trainer or work._build(handed)
    assert trainer.state.step == 5 and bool((trainer.state.mean_P == 0.25).all())
    assert torch.equal(trainer.frozen.head_CH, handed.head_CH)
    trainer.state.step = 6
    work.release()
    again = new_work(settings, tmp_path / "work")
    handed = install(again, engine, tmp_path / "work" / "handed-3")
    assert again._build(handed).state.step == 6  # its checkpoints have the new name
    again.release()
