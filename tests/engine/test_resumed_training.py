"""A restarted trainer goes on from the checkpoint of the drafter that it follows, and no other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.engine.pushing import Pushable
from tests.engine.weight_cases import root, settings
from tlt_server.commands import HandOver
from tlt_server.engine.settings import EngineSettings
from tlt_server.samples.segments import SegmentHeader
from tlt_server.trainer.buffer import BufferBounds, SampleBuffer
from tlt_server.trainer.state_store import StateStore
from tlt_server.trainer.work import DrafterWork, WorkSettings
from tlt_server.training import HandedOver

__all__ = ["root", "settings"]  # fixtures


def steps_of_a_new_process(settings: EngineSettings, place: Path, done: int) -> int:
    """Return the steps that a trainer of this engine's drafter begins with; it leaves `done`."""
    engine, handed = Pushable(settings), place / "handed"
    assert settings.drafter is not None
    engine.engine.send(HandOver("out", str(handed), settings.drafter))
    state = engine.report("out").state
    buffer = SampleBuffer(None, SegmentHeader(1, 40, "m", ""), BufferBounds(100, 1000))
    given = WorkSettings(Path(settings.model), place, place.parent / "checkpoints", "cpu", 512)
    work = DrafterWork(given, buffer, StateStore(0, 0))
    work.install(HandedOver(directory=str(handed), target=state.target, drafter=state.drafter))
    assert work._handed is not None and state.drafter == "initial"
    trainer = work._build(work._handed)
    found, trainer.state.step = trainer.state.step, done
    work.release()
    return found


def test_a_checkpoint_of_another_drafter_of_the_same_version_is_not_resumed(
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
