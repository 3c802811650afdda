"""Prepares the steps that requests may bring: a rehearsal lists the kernels that they launch, and
when these are loaded the steps are captured, without a run of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from tlt_kernels.gpu.variants import Unloaded, Variant, listed, only_loaded
from tlt_server.engine.devices import OnProgress
from tlt_server.engine.gpu.drafts import DraftKey
from tlt_server.engine.gpu.extend import Extend, ExtendKey, SecondHalf
from tlt_server.engine.gpu.kernel_start import KernelStart
from tlt_server.engine.gpu.runner import GpuRunner
from tlt_server.models.gpu.exchange import Stored, compile_exchange

Keys = list[DraftKey | ExtendKey]


def prepare(
    runner: GpuRunner,
    kernels: KernelStart,
    networks: Iterable[object],
    keys: Keys,
    on_progress: OnProgress,
    *,
    run_first: bool,
) -> None:
    """Load the kernels of these steps and of pushes to these networks, and capture the steps; see
    `capture` for `run_first`.
    """
    networks = [*networks]

    def list_kernels() -> list[Variant]:
        with listed() as found:
            rehearse(runner, keys)
            load_exchange(networks)
        return [*found]

    with kernels.recorded():
        kernels.load(list_kernels, partial(on_progress, "compile kernels"))
        capture(runner, keys, partial(on_progress, "prepare runner"), run_first=run_first)
        load_exchange(networks)


def load_exchange(networks: Iterable[object]) -> None:
    """Load the kernels of pushes to these networks."""
    for network in networks:
        assert isinstance(network, Stored)
        compile_exchange(network)


def rehearse(runner: GpuRunner, keys: Keys) -> None:
    """Launch all that steps of these keys launch, once, and capture nothing."""
    with runner.at_rest():
        for key in keys:
            part = runner.pass_of(key)
            runner.work(part)()
            if isinstance(part, Extend) and part.key.structured:
                part.run_second()
            if isinstance(key, DraftKey):
                runner.cap_rows(key)
        _between(runner, keys)
        _after(runner)


def capture(
    runner: GpuRunner, keys: Keys, on_key: Callable[[int, int], None], *, run_first: bool
) -> None:
    """Capture the steps of these keys, in this order; `on_key(done, of)` follows each. Kernels of
    ours are loaded; with `run_first`, libraries of others get ready in a run of each key.
    """
    with runner.at_rest():
        for done, key in enumerate(keys):
            if run_first:
                runner.run_empty(key)
            elif runner.keeps(key):
                _capture(runner, key)
            on_key(done + 1, len(keys))
        _after(runner)


def _capture(runner: GpuRunner, key: DraftKey | ExtendKey) -> None:
    """Capture a key without a run. One that lacks a kernel is run first, because a capture must not
    load any.
    """
    try:
        with only_loaded():
            part = runner.pass_of(key)
            runner.graphs.record(key, runner.work(part))
            if isinstance(part, Extend) and part.key.structured:
                runner.graphs.record(SecondHalf(part.key), part.run_second)
    except Unloaded:
        runner.run_empty(key)


def _between(runner: GpuRunner, keys: Keys) -> None:
    """Launch what steps launch between a draft and an extend pass."""
    extends = [key for key in keys if isinstance(key, ExtendKey) and not key.plain]
    for extend in map(runner.extend_pass, extends):
        extend.select(None)
    for key in keys:
        for extend in (runner.extend_pass(other) for other in extends if other.batch == key.batch):
            if isinstance(key, DraftKey):
                extend.select(runner.draft_pass(key).nodes)
                runner.learn(extend, runner.draft_pass(key))


def _after(runner: GpuRunner) -> None:
    """Launch what follows steps, so that its kernels, too, are loaded before a trainer may hold the
    GPU.
    """
    runner.forget()
    for filtered, edited in ((False, False), (True, False), (False, True)):
        runner.rehearse_reports(ExtendKey(1, 1, filtered=filtered, edited=edited))
