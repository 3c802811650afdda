"""The outputs of `tlt bench exact` over more than one epoch of an engine: a rank is killed while
requests run, and the next epoch resumes them.
"""

from __future__ import annotations

import hashlib
import os
import signal
from typing import NamedTuple

import msgspec
import numpy as np

from tlt_server.engine.cpu.runner import CpuRunner
from tlt_server.engine.loop import Engine
from tlt_server.engine.ranks.ranks import Ranks
from tlt_server.errors import EngineFailed
from tlt_server.wire.records import GenerateRequest


class Bits(NamedTuple):
    """The output of one request in one run."""

    tokens: list[int]
    logprobs: bytes  # float32; those of the prompt come first


def digest_of(outputs: dict[str, Bits]) -> str:
    """Return a hash of all outputs. If it moves, the fingerprint has to."""
    found = hashlib.sha256()
    for id, (tokens, logprobs) in sorted(outputs.items()):
        found.update(msgspec.msgpack.encode((id, tokens, logprobs)))
    return found.hexdigest()[:16]


class SaidBits:
    """Everything that requests have said so far."""

    def __init__(self, requests: list[GenerateRequest]) -> None:
        self._tokens: dict[str, list[int]] = {r.id: [] for r in requests}
        self._logprobs: dict[str, list[float]] = {r.id: [] for r in requests}
        self._open = {r.id: r for r in requests}
        self.passes = 0

    def run(self, engine: Engine, until_tokens: float = float("inf")) -> None:
        """Step until no request runs, or there are as many tokens of all."""
        while not engine.idle and sum(map(len, self._tokens.values())) < until_tokens:
            for output in engine.step():
                assert output.error is None, f"{output.id}: {output.error}"
                scored = [each for each in output.prompt_logprobs or [] if each is not None]
                self._tokens[output.id] += output.token_ids
                self._logprobs[output.id] += [
                    *(each.logprobs[0] for each in scored),
                    *output.logprobs,
                ]
                if output.finish_reason is not None:
                    del self._open[output.id]
            self.passes += engine.last_cycle is not None

    def rest(self) -> list[GenerateRequest]:
        """Return the requests that have not ended, by which another engine resumes them."""
        return [
            msgspec.structs.replace(request, generated=self._tokens[id])
            for id, request in self._open.items()
        ]

    def bits(self) -> dict[str, Bits]:
        return {
            id: Bits(tokens, np.array(self._logprobs[id], np.float32).tobytes())
            for id, tokens in self._tokens.items()
        }


def run_until_killed(engine: Engine, said: SaidBits, tokens: int) -> None:
    """Run until there are as many tokens; then kill a rank, which must end the engine's epoch."""
    runner = engine.runner
    assert isinstance(runner, CpuRunner) and isinstance(runner.ranks, Ranks)
    said.run(engine, tokens)
    assert said.rest(), "nothing runs at the kill"
    os.kill(runner.ranks.pids[-1], signal.SIGKILL)
    try:
        said.run(engine)
    except EngineFailed:
        runner.ranks.close()
    else:
        raise AssertionError("the engine went on without a rank")
