"""A speculating engine, commands that halt it, and the outputs of its requests."""

from __future__ import annotations

import pytest
import torch

from tests.engine.pushing import Pushable
from tests.engine.weight_cases import request
from tlt_server.engine.settings import EngineSettings
from tlt_server.wire.commands import ControlCommand, SetPolicy
from tlt_server.wire.events import ControlReport
from tlt_server.wire.records import Strategy

EAGLE = SetPolicy("fixed", Strategy("eagle", 4, 2, 8))


def speculating(settings: EngineSettings) -> Pushable:
    engine = Pushable(settings)
    engine.engine.send(EAGLE)
    return engine


@pytest.fixture(scope="module")
def expected(settings: EngineSettings) -> dict[str, tuple[list[int], list[float]]]:
    return Pushable(settings).run(*(request(i) for i in range(3)))


@pytest.fixture
def engine(settings: EngineSettings) -> Pushable:
    return speculating(settings)


def send(engine: Pushable, command: ControlCommand) -> ControlReport | None:
    """Return the command's report, if one came with the next step."""
    engine.engine.send(command)
    engine.step()
    return next(
        (report for report in engine.engine.control_reports() if report.id == command.id), None
    )


def done(engine: Pushable, command: ControlCommand) -> None:
    assert send(engine, command) == ControlReport(command.id)


def started(engine: Pushable, steps: int = 4) -> None:
    engine.submit(*(request(i) for i in range(3)))
    engine.step(steps)


def bits(engine: Pushable) -> dict[str, tuple[list[int], list[float]]]:
    return {f"r{i}": (engine.tokens(f"r{i}"), engine.logprobs(f"r{i}")) for i in range(3)}


def disk_full(**options: object) -> None:
    raise OSError(28, "No space left on device")


def out_of_memory() -> None:
    raise torch.OutOfMemoryError("no room")
