"""A drafter in FP8 on the interpreter's GPU engine: tokens do not change, ranks draft the same, and
a push swaps what it was made from, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from tests.engine.fast_interpreter import patched_once
from tests.engine.gpu_engine import bits, interpreted, request
from tests.engine.pushing import Pushable, perturbed
from tests.engine.ranks_of_tests import run_rank_of_tests
from tests.engine.tiny import SMALLEST, Shape, write_eagle, write_eagle1, write_target
from tests.engine.two_ranks import two_ranks
from tlt_server.demo.workload import DRAFTER, TARGET, problems_as_requests
from tlt_server.engine.settings import EngineSettings
from tlt_server.errors import ModelError
from tlt_server.settings.server import QuantizationName
from tlt_server.trainer.replaying.handed import gpu_frame
from tlt_server.trainer.replaying.replay import ReplayedDrafter

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's")
REQUESTS = [
    msgspec.structs.replace(each, token_ids=each.token_ids[-6 - i :])
    for i, each in enumerate(problems_as_requests(TARGET, 2, group=1, seed=0, max_tokens=5))
]
IDS = [each.id for each in REQUESTS]
# The smallest widths that blocks of 128 divide.
WIDE = Shape(vocab=64, hidden=128, layers=2, head_dim=128, mlp=128, features=(1, 0, 1))


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineSettings]:
    with patched_once(), pytest.MonkeyPatch.context() as patch:
        run_rank_of_tests(patch, "interpreted_rank")
        yield EngineSettings(
            model=TARGET,
            drafter=str(DRAFTER),
            drafter_quantization="fp8",
            policy="fixed",
            sd_strategy="eagle:3x1x4",
            device="interpreter",  # type: ignore[arg-type]
            attention="triton",
            pages=24,
            max_model_len=64,
            max_running=2,
            max_rows=16,
            weight_root=tmp_path_factory.mktemp("drafters"),
        )


def ran(engine: Pushable) -> tuple[object, list[int]]:
    """Return everything said of tokens, and the accepted drafts of each step."""
    engine.said.clear()
    engine.submit(*REQUESTS)
    accepted = []
    while not engine.engine.idle:
        engine.step()
        accepted += engine.engine.last_cycle.accepted if engine.engine.last_cycle else []
    return bits(engine, IDS), accepted


def test_tokens_stay_and_a_push_swaps_the_originals(settings: EngineSettings) -> None:
    engine = Pushable(settings)
    plain = Pushable(replace(settings, drafter_quantization="none"))
    said, accepted = ran(engine)
    assert said == ran(plain)[0] and sum(accepted)
    before = engine.checksums()
    assert before == plain.checksums()
    assert settings.weight_root is not None
    other = perturbed(DRAFTER, Path(settings.weight_root) / "other", 4)
    for each in (engine, plain):
        report = each.push(other, "d1", role="drafter")
        assert report.result == "committed", report.error
    assert engine.checksums() == plain.checksums() != before
    assert ran(engine)[0] == said
    assert engine.roll_back().result == "rolled_back" and engine.checksums() == before
    assert ran(engine)[0] == said


@pytest.mark.parametrize("how", ["shared", "replicated"])
def test_two_ranks_draft_as_one_in_fp8(settings: EngineSettings, how: str) -> None:
    found = ran(Pushable(settings))
    with two_ranks(replace(settings, drafter_parallel=how)) as shared:
        assert ran(shared) == found
        assert shared.checksums() == Pushable(settings).checksums()


def test_eagle1_in_fp8_changes_no_token(tmp_path: Path) -> None:
    write_target(tmp_path / "base", shape=WIDE)
    write_eagle1(tmp_path / "drafter", tmp_path / "base", shape=WIDE)
    given = replace(
        interpreted(tmp_path), policy="fixed", sd_strategy="eagle:2x1x3", max_running=2, max_rows=16
    )
    asked = [request(i) for i in range(2)]
    with patched_once():
        plain, engine = Pushable(given), Pushable(replace(given, drafter_quantization="fp8"))
        for each in (plain, engine):
            each.run(*asked)
    ids = [each.id for each in asked]
    assert bits(engine, ids) == bits(plain, ids) and engine.checksums() == plain.checksums()


@pytest.mark.parametrize("how", ["none", "fp8"])
def test_trainer_loads_eagle1_for_a_gpus_replay(tmp_path: Path, how: QuantizationName) -> None:
    """The head is the target's."""
    base = write_target(tmp_path / "base", shape=WIDE)
    drafter = write_eagle1(tmp_path / "drafter", base, shape=WIDE)
    embedding_VH = torch.randn(WIDE.vocab, WIDE.hidden, dtype=torch.bfloat16)
    frame = gpu_frame(base, drafter, embedding_VH, embedding_VH, 2)
    network = ReplayedDrafter.load(drafter, frame, device="cuda", quantization=how).weights.network
    assert network.head_matrix.values is embedding_VH and network.quantization == how


def test_widths_that_cut_blocks_are_refused_with_the_remedy(tmp_path: Path) -> None:
    base = write_target(tmp_path / "base", shape=SMALLEST)
    drafter = write_eagle(tmp_path / "drafter", shape=SMALLEST, draft_vocab=40)
    embedding_VH = torch.randn(SMALLEST.vocab, SMALLEST.hidden)
    frame = gpu_frame(base, drafter, embedding_VH, embedding_VH, 2)
    with pytest.raises(ModelError, match="multiple of 128; use --drafter-quantization none"):
        ReplayedDrafter.load(drafter, frame, device="cuda", quantization="fp8")
