"""Faults that `tlt bench exact` plants to show that it would detect them: logits one ulp too high,
in thirty steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from tlt_server.engine.cpu.runner import CpuRunner
from tlt_server.engine.loop import Engine

# Calls of the sampler; thirty, because a single ulp may vanish when a log-prob is rounded.
CALLS = range(9, 39)


@contextmanager
def planted(engine: Engine) -> Iterator[None]:
    """Plant the fault during the context. An engine on a GPU must run launch by launch, because
    graphs are fixed when they are captured.
    """
    runner = engine.runner
    if isinstance(runner, CpuRunner):
        sound = runner.sample
        runner.sample = one_ulp_off(sound)
        yield
        runner.sample = sound
    else:
        with _on_device():
            yield


def one_ulp_off(sample: Callable[..., Any]) -> Callable[..., Any]:
    """Return the CPU's sampler with the logit of row 0's token one ulp higher. Row 0 is a root, so
    its token is always emitted.
    """
    calls = itertools.count()

    def faulty(logits_SV: Any, *rest: Any) -> Any:
        if next(calls) in CALLS and len(logits_SV):
            token = int(sample(logits_SV, *rest).token_S[0])
            logits_SV[0, token] = float(
                np.nextafter(np.float32(logits_SV[0, token]), np.float32(np.inf))
            )
        return sample(logits_SV, *rest)

    return faulty


@contextmanager
def _on_device() -> Iterator[None]:
    """Modify every row's token: only the device knows which rows are live."""
    import torch

    from tlt_kernels.gpu.tensors import Samples
    from tlt_server.engine.gpu.steps.extend import Extend

    calls, sound = itertools.count(), Extend.sample

    def faulty(extend: Extend, logits_SV: torch.Tensor) -> Samples:
        sampled = sound(extend, logits_SV)
        if next(calls) in CALLS:
            # A dead row's token may be anything.
            token_S1 = sampled.token_S.clamp(0, logits_SV.shape[1] - 1).to(torch.int64)[:, None]
            value_S1 = logits_SV.gather(1, token_S1)
            logits_SV.scatter_(
                1, token_S1, value_S1.nextafter(torch.full_like(value_S1, torch.inf))
            )
            sampled = sound(extend, logits_SV)
        return sampled

    Extend.sample = faulty  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Extend.sample = sound  # type: ignore[method-assign]
