"""The tables by which drafters build their trees, over pushes and rollbacks, on the CPU and on the
interpreter: each version begins with its own calibration and later resumes its learnt table.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.engine.fast_interpreter import patched_once
from tests.engine.gpu_engine import checkpoints, drafting, on_cpu, request
from tests.engine.pushing import Pushable
from tests.engine.tiny import SMALLEST, write_eagle
from tlt_server.engine.gpu.runner import GpuRunner
from tlt_server.engine.settings import EngineSettings
from tlt_server.speculation.calibration import (
    BUCKETS,
    PHASES,
    RANKS,
    Calibration,
    TableRecord,
    default_acceptance,
)
from tlt_server.speculation.learnt import DOUBT
from tlt_server.weights.checksums import origin_of
from tlt_server.wire.commands import NameWeights

SHIPPED = default_acceptance().reshape(-1)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineSettings]:
    root = tmp_path_factory.mktemp("smallest")
    with patched_once():
        settings = checkpoints(root)
        write_eagle(root / "new-drafter", seed=5, shape=SMALLEST, draft_vocab=40)
        shutil.copytree(root / "new-drafter", root / "calibrated")
        Calibration(pushed_table()).save(root / "calibrated")
        yield settings


@pytest.fixture(params=["cpu", pytest.param("interpreter", marks=pytest.mark.long)])
def engine(request: pytest.FixtureRequest, settings: EngineSettings) -> Pushable:
    return taught(on_cpu(settings) if request.param == "cpu" else settings)


def taught(settings: EngineSettings) -> Pushable:
    engine = Pushable(drafting(settings, "eagle", 2, 2, 4))
    learn(engine, 0)
    return engine


def pushed_table() -> NDArray[np.float32]:
    return np.random.default_rng(1).random((PHASES, RANKS, BUCKETS)).astype(np.float32)


def learn(engine: Pushable, seed: int) -> None:
    engine.run(*(request(10 * seed + i, 4 + i, max_tokens=8) for i in range(2)))


def learnt(engine: Pushable) -> dict[str, TableRecord]:
    return {name: table.record() for name, table in engine.engine.choice.knowledge.tables.items()}


def acceptance(engine: Pushable) -> NDArray[np.float32]:
    """Return the table that trees are built by."""
    runner = engine.engine.runner
    drafters = runner.passes.drafters if isinstance(runner, GpuRunner) else runner._drafters
    table = drafters["eagle"].calibration
    if isinstance(table, Calibration):
        return table.acceptance_K.copy()
    return table.acceptance_Z.numpy().copy()


def trials(record: TableRecord) -> float:
    return sum(record.trials)


def doubted(record: TableRecord) -> tuple[list[float], list[float]]:
    return [hits // DOUBT for hits in record.hits], [each // DOUBT for each in record.trials]


def test_each_drafter_version_has_its_own_learnt_table(
    engine: Pushable, settings: EngineSettings
) -> None:
    root, first = Path(settings.weight_root or ""), learnt(engine)
    first_acceptance = acceptance(engine)
    assert trials(first["eagle"]) > 0 and not np.array_equal(first_acceptance, SHIPPED)
    assert engine.push(root / "calibrated", "d1", role="drafter").result == "committed"
    assert np.array_equal(acceptance(engine), pushed_table().reshape(-1))
    assert trials(learnt(engine)["eagle"]) == 0

    learn(engine, 1)
    second, second_acceptance = learnt(engine), acceptance(engine)
    assert engine.push(root / "new", "v1").result == "committed"
    for name, table in learnt(engine).items():
        assert (table.hits, table.trials) == doubted(second[name])
    assert np.abs(acceptance(engine) - pushed_table().reshape(-1)).max() < 0.3

    learn(engine, 2)
    assert engine.roll_back().result == "rolled_back"
    assert learnt(engine) == second, "of this target and this drafter"
    np.testing.assert_allclose(acceptance(engine), second_acceptance, rtol=1e-6)
    assert engine.roll_back("initial", role="drafter").result == "rolled_back"
    assert learnt(engine) == first
    np.testing.assert_allclose(acceptance(engine), first_acceptance, rtol=1e-6)


def test_uncalibrated_drafter_begins_with_shipped_table(
    engine: Pushable, settings: EngineSettings
) -> None:
    root = Path(settings.weight_root or "")
    assert engine.push(root / "new-drafter", "d1", role="drafter").result == "committed"
    assert np.array_equal(acceptance(engine), SHIPPED)


def test_learnt_table_follows_weight_content_not_version_name(settings: EngineSettings) -> None:
    root, engine = Path(settings.weight_root or ""), taught(on_cpu(settings))
    assert engine.push(root / "new", "v1").result == "committed"
    learn(engine, 1)
    of_new = learnt(engine)
    for version, weights, same in (("v2", "base", 0), ("v3", "new", 1)):
        assert engine.push(root / weights, version).result == "committed"
        assert (learnt(engine) == of_new) == same


def test_checkpoints_are_distinguished_by_sampled_parts(settings: EngineSettings) -> None:
    model, root = Path(settings.model), Path(settings.weight_root or "")
    assert origin_of(model) == origin_of(model) != origin_of(root / "new")


def test_rollback_to_renamed_target_restores_its_tables(settings: EngineSettings) -> None:
    engine = taught(on_cpu(settings))
    first = learnt(engine)
    engine.engine.send(NameWeights("named", "v0"))
    assert engine.report("named").result == "named"
    assert engine.push(Path(settings.weight_root or "") / "new", "v1").result == "committed"
    assert learnt(engine) != first
    assert engine.roll_back("v0").result == "rolled_back"
    assert learnt(engine) == first
