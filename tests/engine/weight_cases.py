"""Checkpoints, settings and requests for the tests that push weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from tests.engine.pushing import Pushable, cpu_settings, perturbed
from tests.engine.tiny import SHALLOW, VOCAB, write_eagle, write_target
from tlt_server.engine.settings import EngineSettings
from tlt_server.wire.records import GenerateRequest, Sampling


def checkpoints(root: Path) -> Path:
    """Write a model with a drafter, and other weights for both."""
    write_target(root / "base", shape=SHALLOW)
    write_eagle(root / "drafter", shape=SHALLOW)
    perturbed(root / "base", root / "new", 1)
    perturbed(root / "base", root / "newer", 2)
    perturbed(root / "drafter", root / "new-drafter", 3)
    return root


def serving(root: Path) -> EngineSettings:
    return cpu_settings(root / "base", root / "drafter", kv_memory_mb=16, weight_root=str(root))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints(tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="module")
def settings(root: Path) -> EngineSettings:
    return serving(root)


@pytest.fixture
def engine(settings: EngineSettings) -> Pushable:
    return Pushable(settings)


def request(i: int = 0, max_tokens: int = 40, **fields: object) -> GenerateRequest:
    sampling = Sampling(max_tokens=max_tokens, ignore_eos=True)
    return msgspec.structs.replace(
        GenerateRequest(
            id=f"r{i}",
            token_ids=[(7 * i + 3 * p) % (VOCAB - 1) for p in range(21 + i)],
            sampling=sampling,
            seed=50 + i,
        ),
        **fields,
    )


def fresh(
    settings: EngineSettings, model: Path, *requests: GenerateRequest
) -> dict[str, tuple[list[int], list[float]]]:
    """Return the outputs of an engine that never had other weights."""
    return Pushable(replace(settings, model=str(model))).run(*requests)


def continued(asked: GenerateRequest, tokens: list[int]) -> GenerateRequest:
    """The request whose prompt is `asked` with its tokens so far."""
    left = msgspec.structs.replace(
        asked.sampling, max_tokens=asked.sampling.max_tokens - len(tokens)
    )
    return msgspec.structs.replace(asked, token_ids=asked.token_ids + tokens, sampling=left)


def check_spans(engine: Pushable, id: str, versions: list[str]) -> list[int]:
    """Spans cover all tokens without a gap, in order; returns where they begin."""
    spans = engine.spans(id)
    assert [version for version, _, _ in spans] == versions
    starts = [start for _, start, _ in spans]
    assert starts[0] == 0
    assert starts[1:] == [end for _, _, end in spans][:-1]
    assert spans[-1][2] == len(engine.tokens(id))
    return starts
