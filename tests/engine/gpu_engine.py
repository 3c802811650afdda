"""The GPU engine on Triton's CPU interpreter, and the CPU engine as its twin: the smallest
checkpoints, requests, settings.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from tests.engine.pushing import Pushable, perturbed
from tests.engine.tiny import SMALLEST, write_eagle, write_target
from tlt_server.engine.settings import EngineSettings
from tlt_server.wire.commands import SetPolicy
from tlt_server.wire.records import GenerateRequest, Sampling, StepOutput, Strategy, TokenLogprobs

PAGE = 16
# Between two backends every logit differs in its last bits, a log-prob by less than 1e-5 with these
# weights, and the noise in a few ulp. A token differs where two candidates are closer than that:
# about one draw in 1e5. The seeds here draw a few hundred, none such.
LOGPROB_TOLERANCE = 1e-4


def checkpoints(root: Path) -> EngineSettings:
    """Written to `root`: a target, a drafter, and versions a little off; settings of an engine on
    the interpreter.
    """
    write_target(root / "base", shape=SMALLEST)
    write_eagle(root / "drafter", shape=SMALLEST, draft_vocab=40)
    perturbed(root / "base", root / "new", 1, scale=0.05)
    return interpreted(root)


def interpreted(root: Path) -> EngineSettings:
    """Settings of an engine that serves the base and the drafter there."""
    return EngineSettings(
        model=str(root / "base"),
        drafter=str(root / "drafter"),
        policy="off",
        device="interpreter",
        dtype="float32",
        attention="triton",
        pages=24,
        max_model_len=64,
        max_running=3,
        max_rows=12,
        weight_root=str(root),
    )


def on_cpu(settings: EngineSettings) -> EngineSettings:
    return replace(settings, device="cpu", attention="cpu", policy="off", sd_strategy="")


def drafting(
    settings: EngineSettings, drafter: str, depth: int, width: int, rows: int
) -> EngineSettings:
    return replace(settings, policy="fixed", sd_strategy=Strategy(drafter, depth, width, rows).name)


def choose(engine: Pushable, strategy: Strategy | None) -> None:
    engine.engine.send(SetPolicy("fixed", strategy) if strategy else SetPolicy("off"))


def prompt(i: int, length: int) -> list[int]:
    return np.random.default_rng(i).integers(0, SMALLEST.eos, length).tolist()


def request(i: int, length: int = 5, max_tokens: int = 6, **sampling: object) -> GenerateRequest:
    given = msgspec.convert({"max_tokens": max_tokens, "ignore_eos": True, **sampling}, Sampling)
    return GenerateRequest(id=f"r{i}", token_ids=prompt(i, length), sampling=given, seed=300 + i)


def bits(engine: Pushable, ids: list[str]) -> dict[str, tuple[object, ...]]:
    """Everything said of tokens."""
    return {
        id: (
            engine.tokens(id),
            np.array(engine.logprobs(id), np.float32).tobytes(),
            engine.said[id][-1].finish_reason,
            engine.said[id][-1].stop_reason,
        )
        for id in ids
    }


def assert_agree(gpu: Pushable, cpu: Pushable, ids: list[str]) -> None:
    """Same tokens and ends, log-probs as close as two backends are."""
    for id in ids:
        found, expected = gpu.said[id], cpu.said[id]
        assert gpu.tokens(id) == cpu.tokens(id), id
        assert (found[-1].finish_reason, found[-1].stop_reason) == (
            expected[-1].finish_reason,
            expected[-1].stop_reason,
        ), id
        np.testing.assert_allclose(
            gpu.logprobs(id), cpu.logprobs(id), atol=LOGPROB_TOLERANCE, err_msg=id
        )


def joined(outputs: list[StepOutput], field: str) -> list:
    return [value for output in outputs for value in getattr(output, field) or []]


def assert_reports_agree(gpu: Pushable, cpu: Pushable, id: str) -> None:
    """Raw log-probs and alternatives of the same tokens."""
    found, expected = (joined(engine.said[id], "raw_logprobs") for engine in (gpu, cpu))
    np.testing.assert_allclose(found, expected, atol=LOGPROB_TOLERANCE, err_msg=id)
    found, expected = (joined(engine.said[id], "top_logprobs") for engine in (gpu, cpu))
    assert_alternatives_agree(found, expected)


def assert_alternatives_agree(
    found: list[TokenLogprobs | None], expected: list[TokenLogprobs | None]
) -> None:
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None and theirs is not None:
            assert mine.token_ids == theirs.token_ids
            np.testing.assert_allclose(mine.logprobs, theirs.logprobs, atol=LOGPROB_TOLERANCE)
