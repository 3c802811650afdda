"""Structured outputs of the demo pair on a real GPU, captured: no strategy changes a token or a
bit, and every output is a text of its grammar.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from tests.engine.pushing import Pushable
from tlt_server.bench.engines import adopt
from tlt_server.bench.exact_plan import LINES, SCHEMA, WORDS
from tlt_server.demo.workload import DRAFTER, TARGET, problems_as_requests
from tlt_server.engine.gpu.steps.extend import SecondHalf
from tlt_server.engine.settings import EngineSettings
from tlt_server.grammars.compiler import Compiler
from tlt_server.wire.commands import SetPolicy
from tlt_server.wire.records import GenerateRequest, Strategy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

STRATEGIES = [Strategy("eagle", 7, 1, 8), Strategy("eagle", 7, 4, 32), Strategy("history", 8, 2, 8)]


@pytest.fixture(scope="module")
def engine() -> Iterator[Pushable]:
    yield Pushable(
        EngineSettings(
            model=str(TARGET),
            drafter=str(DRAFTER),
            policy="off",
            device="cuda",
            attention="triton",
            kv_memory_mb=1024,
            max_model_len=512,
            max_running=32,
            max_rows=512,
        )
    )


def requests() -> list[GenerateRequest]:
    """32, three of four with a structure, greedy and not."""
    found = []
    grammars = [SCHEMA, LINES, WORDS, None]
    for i, request in enumerate(problems_as_requests(str(TARGET), 32, group=8, seed=5)):
        sampling = msgspec.structs.replace(
            request.sampling,
            max_tokens=96,
            temperature=float(i % 3 > 0),
            top_p=0.9 if i % 5 == 1 else 1.0,
            presence_penalty=0.2 if i % 7 == 2 else 0.0,
            structured_outputs=grammars[i % 4],
        )
        found.append(msgspec.structs.replace(request, sampling=sampling))
    return found


def bits(engine: Pushable) -> dict[str, tuple[object, ...]]:
    return {
        r.id: (
            engine.tokens(r.id),
            np.array(engine.logprobs(r.id), np.float32).tobytes(),
            engine.said[r.id][-1].finish_reason,
        )
        for r in requests()
    }


def test_strategies_change_no_bit_and_outputs_fit_grammars(engine: Pushable) -> None:
    engine.run(*requests())
    plain = bits(engine)
    compiler = Compiler(TARGET, engine.info.vocab_size, engine.info.eos_token_ids)
    tokenizer = Tokenizer.from_file(str(Path(TARGET) / "tokenizer.json"))
    for r in requests():
        assert engine.said[r.id][-1].error is None
        if r.sampling.structured_outputs is None:
            continue
        ids = [token for token in engine.tokens(r.id) if token not in engine.info.eos_token_ids]
        matcher = compiler.compile(r.sampling.structured_outputs)
        assert matcher.consume_tokens(ids), r.id
        if engine.said[r.id][-1].finish_reason == "stop":
            assert matcher.is_accepting()
            if r.sampling.structured_outputs == SCHEMA:
                assert "steps" in json.loads(tokenizer.decode(ids))
    for strategy in STRATEGIES:
        adopt(engine.engine, SetPolicy("fixed", strategy))
        for _ in range(2):  # launch by launch, then captured
            engine.run(*requests())
            assert bits(engine) == plain, strategy.name
    assert any(isinstance(key, SecondHalf) for key in engine.engine.runner.graphs.bytes)
    one = requests()[0]
    engine.run(one)
    assert engine.tokens(one.id) == plain[one.id][0]
