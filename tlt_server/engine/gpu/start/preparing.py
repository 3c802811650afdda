"""Prepares the steps that requests may need: a rehearsal lists the kernels that they launch; once
these are loaded, the steps are captured without a run. So ranks need not agree, and a failing rank
leaves no other waiting.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Protocol

import torch

from tlt_kernels.gpu.variants import Unloaded, Variant, listed, load, only_loaded
from tlt_server.engine.devices import CAPTURING, COMPILING
from tlt_server.engine.gpu.memory.refusals import BUSY
from tlt_server.engine.gpu.passes import Passes, Rehearsed
from tlt_server.engine.gpu.start.kernel_start import KernelStart
from tlt_server.engine.gpu.steps.drafts import DraftKey
from tlt_server.engine.gpu.steps.extend import Extend, ExtendKey, SecondHalf, StructuredExtend
from tlt_server.engine.phases import OnProgress
from tlt_server.errors import Unavailable
from tlt_server.models.gpu.swapping import Stored, compile_swaps
from tlt_server.process.faults import of_gpu
from tlt_server.weights.storage import ran_out

Key = DraftKey | ExtendKey
Keys = list[Key]


class StepRunner(Protocol):
    """A launcher of steps on one GPU: rank 0's runner, or a worker rank."""

    @property
    def passes(self) -> Passes: ...

    def at_rest(self) -> AbstractContextManager[None]:
        """Let the block launch passes of dead rows, while no request runs."""

    def rehearse(self) -> None:
        """Launch the work that follows steps."""


def prepare(
    runner: StepRunner,
    kernels: KernelStart,
    networks: Iterable[object],
    keys: Keys,
    on_progress: OnProgress,
    *,
    on_compiled: Callable[[], None] = lambda: None,
) -> None:
    """Load the kernels of these steps and of pushes to these networks, and capture the steps.
    `on_compiled`: called in between.
    """
    networks = [*networks]

    def list_kernels() -> list[Variant]:
        with listed() as found:
            rehearse(runner, keys)
            load_exchange(networks)
        return [*found]

    with kernels.recorded():
        kernels.load(list_kernels, partial(on_progress, COMPILING))
        on_compiled()
        capture(runner, keys, partial(on_progress, CAPTURING))
        load_exchange(networks)


def load_exchange(networks: Iterable[object]) -> None:
    """Load the kernels of pushes to these networks."""
    for network in networks:
        assert isinstance(network, Stored)
        compile_swaps(network)


def rehearse(runner: StepRunner, keys: Keys) -> None:
    """Launch everything that steps of these keys launch, once, without a capture."""
    with runner.at_rest():
        for rehearsed in rehearsals(keys):
            _rehearse(runner.passes, rehearsed)
        runner.rehearse()


def rehearsals(keys: Keys) -> Iterator[Rehearsed]:
    """Yield the passes that steps of these keys launch."""
    extends = [key for key in keys if isinstance(key, ExtendKey) and not key.plain]
    for key in keys:
        if isinstance(key, ExtendKey):
            yield Rehearsed(None, (key,))
        else:
            yield Rehearsed(key, tuple(each for each in extends if each.batch == key.batch))


@contextmanager
def _refusing(kernel: str = "") -> Iterator[None]:
    """Refuse a policy if the GPU has no room for it or a kernel of it cannot be loaded."""
    try:
        yield
    except Exception as error:
        if ran_out(error):
            raise Unavailable(
                f"the GPU has no room for the kernels of this policy; {BUSY}, then set it again"
            ) from None
        if not kernel or of_gpu(error):
            raise
        why = f"{type(error).__name__}: {str(error)[:200]}"
        raise Unavailable(
            f"kernel {kernel} of this policy is not loaded ({why}); set it again once that is "
            "mended"
        ) from error


class KernelList:
    """The kernels of a policy that one rank has not loaded, in the order of their passes. Failures
    raise `Unavailable`.
    """

    def __init__(self, passes: Passes) -> None:
        self._passes, self._before = passes, passes.made
        self.found: dict[Variant, None] = {}
        self._unloaded: deque[Variant] = deque()

    @property
    def left(self) -> int:
        """Return the number of kernels that are not loaded yet."""
        return len(self._unloaded)

    def add(self, rehearsed: Rehearsed) -> None:
        """List the unloaded kernels of these passes. It launches none of our kernels, so requests
        may run.
        """
        with _refusing(), torch.inference_mode(), torch.cuda.stream(self._passes.stream):
            with listed() as found:
                _rehearse(self._passes, rehearsed)
        self._unloaded += (variant for variant in found if variant not in self.found)
        self.found |= found

    def load(self, count: int, *, last: bool) -> None:
        """Load the next `count` kernels; with `last`, all the rest."""
        for _ in range(self.left if last else min(count, self.left)):
            variant = self._unloaded.popleft()
            with _refusing(variant.kernel):
                load(variant)

    def drop(self) -> None:
        """Free the buffers of the listing."""
        self._passes.drop(self._passes.made - self._before)


def capture(runner: StepRunner, keys: Keys, on_key: Callable[[int, int], None]) -> None:
    """Capture the steps of these keys, in order, and call `on_key(done, of)` after each. Our
    kernels are loaded; vendor libraries initialize in a run of each key.
    """
    passes = runner.passes
    with runner.at_rest():
        for done, key in enumerate(keys):
            if passes.run_first:
                passes.run_empty(key)
            elif passes.keeps(key):
                try:
                    with only_loaded():
                        _capture(passes, key)
                except Unloaded:  # a capture must not load any
                    _capture_later(passes, key)
            on_key(done + 1, len(keys))
        runner.rehearse()


def record(passes: Passes, key: DraftKey | ExtendKey) -> None:
    """Capture a key between two steps; if that needs a run, no request may run. When memory runs
    out, only this rank stops capturing.
    """
    try:
        if passes.run_first:
            passes.run_empty(key)
        else:
            _capture_later(passes, key)
    except RuntimeError as error:
        if not ran_out(error):
            raise
        passes.graphs.end(f"the GPU has no room to record {key}", BUSY)


def _capture_later(passes: Passes, key: DraftKey | ExtendKey) -> None:
    """Capture a key after everything that a step of it launches is loaded."""
    with listed() as found:
        _launch(passes, key)
    for variant in found:
        load(variant)
    _capture(passes, key)


def _capture(passes: Passes, key: DraftKey | ExtendKey) -> None:
    """Capture a key without a run."""
    part = passes.of(key)
    passes.graphs.record(key, passes.work(part))
    if isinstance(part, StructuredExtend):
        passes.graphs.record(SecondHalf(part.key), part.run_second)


def _launch(passes: Passes, key: DraftKey | ExtendKey) -> None:
    """Launch a key's pass and its step's other launches."""
    part = passes.of(key)
    if isinstance(part, Extend) and not part.key.plain:
        part.select(None)
    passes.work(part)()
    if isinstance(part, StructuredExtend):
        part.run_second()
    if isinstance(key, DraftKey):
        passes.cap_rows(key)


def _rehearse(passes: Passes, rehearsed: Rehearsed) -> None:
    """Launch everything that steps of these passes launch."""
    if rehearsed.draft is None:
        for key in rehearsed.extends:
            _launch(passes, key)
        return
    _launch(passes, rehearsed.draft)
    drafted = passes.draft(rehearsed.draft)
    for key in rehearsed.extends:
        extend = passes.extend(key)
        extend.select(drafted.nodes, drafted.own_columns)
        passes.learn(extend, drafted)
