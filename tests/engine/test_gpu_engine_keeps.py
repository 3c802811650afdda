"""The GPU engine keeps its buffers between steps, and no activations."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.engine.fast_interpreter import patched_once
from tests.engine.gpu_engine import checkpoints, drafting, request
from tests.engine.pushing import Pushable


@pytest.fixture(autouse=True)
def fast() -> Iterator[None]:
    with patched_once():
        yield


def test_no_activation_outlives_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Pushable(replace(drafting(checkpoints(tmp_path), "eagle", 3, 2, 4), max_rows=64))
    model, hidden = engine.engine.runner.state.model, []
    sound = model.forward

    def forward(*given: Any) -> Any:
        forwarded = sound(*given)
        hidden.append(weakref.ref(forwarded.hidden_RH))
        return forwarded

    monkeypatch.setattr(model, "forward", forward)
    engine.run(request(0, 9, max_tokens=4))
    gc.collect()
    assert len(hidden) > 2 and not any(held() is not None for held in hidden)


def test_a_pass_that_is_not_captured_is_made_for_its_step(tmp_path: Path) -> None:
    engine = Pushable(replace(checkpoints(tmp_path), max_rows=64))
    for i, length in enumerate((3, 9, 13, 17, 21)):  # a captured step would hold the first
        engine.run(request(i, length, max_tokens=1))
    kept = engine.engine.runner.passes.extends
    assert kept and all(engine.engine.runner.shapes.keeps(key) for key in kept) and len(kept) < 5


def test_pages_are_reserved_for_the_depth_in_use(tmp_path: Path) -> None:
    engine = Pushable(drafting(checkpoints(tmp_path), "eagle", 20, 1, 21))
    assert engine.engine.runner.state.depth == engine.engine.scheduler.lookahead == 20
