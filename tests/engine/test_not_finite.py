"""KV that a pass spoilt (NaN) is no prefix for other requests: one with the same prompt is served
as if nothing had been.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import msgspec
import pytest
import torch

from tests.engine.fast_interpreter import patched_once
from tests.engine.gpu_engine import PAGE, bits, checkpoints, drafting, on_cpu, request
from tests.engine.pushing import Pushable
from tlt_server.engine.settings import EngineSettings
from tlt_server.wire.records import GenerateRequest

ASKED = request(0, PAGE + 6, max_tokens=4)
AGAIN = msgspec.structs.replace(ASKED, id="again")
SIBLING = msgspec.structs.replace(ASKED, id="sibling", seed=7)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineSettings]:
    with patched_once():
        chunked = replace(checkpoints(tmp_path_factory.mktemp("smallest")), max_rows=PAGE)
        yield drafting(chunked, "eagle", 2, 1, 3)


def target(engine: Pushable) -> dict[str, torch.Tensor]:
    runner = engine.engine.runner
    return (runner.model if hasattr(runner, "model") else runner.state.model).parameters()


def spoilt(engine: Pushable, *asked: GenerateRequest) -> None:
    """Run these while the first layer computes NaN, until each has ended with one typed error."""
    norm_H = target(engine)["model.layers.0.input_layernorm.weight"]
    kept_H = norm_H.clone()
    norm_H.fill_(float("nan"))
    engine.run(*asked)
    norm_H.copy_(kept_H)
    for one in asked:
        (error,) = [output.error for output in engine.said[one.id] if output.finish_reason]
        assert error is not None and error[0] == "not_finite" and "NaN" in error[1]


@pytest.mark.parametrize("device", ["cpu", pytest.param("interpreter", marks=pytest.mark.long)])
def test_states_of_a_failed_sequence_are_not_reused(device: str, settings: EngineSettings) -> None:
    settings = (
        settings
        if device == "interpreter"
        else replace(on_cpu(settings), policy=settings.policy, sd_strategy=settings.sd_strategy)
    )
    sound, engine = Pushable(settings), Pushable(settings)
    sound.run(ASKED)
    sound.run(AGAIN)
    # The second one finds the first one's page before either has failed.
    spoilt(engine, ASKED, SIBLING)
    assert engine.engine.gauges()["pages_cached"] == 0
    assert engine.engine.gauges()["pages_free"] == engine.info.pages
    engine.run(ASKED)
    engine.run(AGAIN)
    assert bits(engine, ["r0", "again"]) == bits(sound, ["r0", "again"])
    assert [engine.said[id][0].cached_tokens for id in ("r0", "again")] == [0, PAGE]
    drafts = [[(o.drafted, o.accepted) for o in one.said["again"]] for one in (engine, sound)]
    assert drafts[0] == drafts[1] and sum(drafted for drafted, _ in drafts[0]), (
        "the drafter reads what lies next to those pages"
    )
