"""The kernels of one start, compiled ahead and loaded: in parallel with the weights if a record
lists them, else after a rehearsal has listed them.

A start that finds all of them in Triton's cache compiles and rehearses nothing. All kernels of a
step are loaded before the step is captured.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from hashlib import sha256
from itertools import count
from pathlib import Path

import msgspec
import torch

from tlt_kernels.gpu.variants import Variant, load
from tlt_server.engine.gpu.start.compiling import ParallelCompiler, worker_count
from tlt_server.engine.gpu.start.kernel_records import (
    KernelRecord,
    cache_directory,
    extend_record,
    read_record,
    record_name,
    recorded,
    toolchain,
)
from tlt_server.engine.settings import DecidedSettings
from tlt_server.models.config import ModelConfig
from tlt_server.wire.fingerprint import sources

WARP = 32
NICENESS = 10  # next to an engine that serves
FEW = 4  # kernels that one process compiles before another is ready to
_starts = count()  # starts of this process


class KernelStart:
    def __init__(self, engine: str) -> None:
        """Start to compile or load; without a record, initialize the compiler. `engine`: see
        `engine_digest`.
        """
        self._engine, self._toolchain, self._cache = engine, toolchain(), cache_directory()
        self._known = read_record(self._cache, record_name(self._toolchain, engine))
        self.compiled = 0
        self._compiler: ParallelCompiler | None = None
        self._loading: Future[None] | None = None
        self._writer = ThreadPoolExecutor(1)  # one at a time, since each reads what is there
        self._target = ("cuda", int(self._toolchain["capability"].replace(".", "")), WARP)
        first = not next(_starts)
        if self._known is None:
            # What an earlier engine of this process has loaded, a later one does not compile.
            self._compiler = ParallelCompiler(self._target) if first else None
        elif self._known.started and self._known.complete(self._cache):
            thread = ThreadPoolExecutor(1, initializer=_on_gpu_of_process())
            self._loading = thread.submit(load_all, _variants(self._known))
            thread.shutdown(wait=False)
        else:
            self._compiler = ParallelCompiler(self._target, _variants(self._known))

    def load(
        self, rehearse: Callable[[], list[Variant]], on_progress: Callable[[int, int], None]
    ) -> None:
        """Load every kernel; `rehearse` lists them if no record does."""
        if self._loading is not None:
            self._loading.result()
            return
        variants = _variants(self._known) if self._known else rehearse()
        if self._known is None:
            if self._compiler is None and len(variants) > FEW:
                self._compiler = ParallelCompiler(self._target)
            if self._compiler is not None:
                self._compiler.compile(variants)
        if self._compiler is not None:
            self.compiled = self._compiler.wait(on_progress)
        load_all(variants)

    def compiler(self, variants: Sequence[Variant]) -> ParallelCompiler:
        """Start to compile these while the engine serves, with half of the processes at low
        priority.
        """
        workers = max(1, worker_count() // 2)
        return ParallelCompiler(self._target, variants, workers=workers, niceness=NICENESS)

    def remember(self, found: Mapping[Variant, str]) -> None:
        """Record these kernels for the next start of this engine, without waiting for the disk.
        `found`: as `variants.loaded` returns them.
        """
        name = record_name(self._toolchain, self._engine)
        self._writer.submit(extend_record, self._cache, name, found)

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record the kernels that the block loads, for the next start."""
        with recorded(self._cache, self._known, self._toolchain, self._engine):
            yield


def _on_gpu_of_process() -> Callable[[], None]:
    """Return the initializer of a thread, whose default GPU would be the first."""
    if not torch.cuda.is_available():
        return lambda: None
    return partial(torch.cuda.set_device, torch.cuda.current_device())


def _variants(record: KernelRecord) -> list[Variant]:
    return [Variant(k.module, k.kernel, k.specialization) for k in record.kernels]


def load_all(variants: Sequence[Variant]) -> None:
    """Load these kernels. A kernel that cannot be loaded is left to its first launch; one line on
    stderr counts these.
    """
    errors = []
    for variant in variants:
        try:
            load(variant)
        except Exception as error:  # a record may list what this version does not have
            errors.append(f"{variant.kernel}: {error}")
    if errors:
        print(
            f"tlt: {len(errors)} of {len(variants)} kernels are not loaded ahead ({errors[0][:200]}"
            "); each is loaded when it is first used, which takes longer",
            file=sys.stderr,
        )


def engine_digest(settings: DecidedSettings, config: ModelConfig) -> str:
    """Return a digest of everything, apart from the toolchain, that decides which kernels an engine
    needs.
    """
    directory = settings.drafter_directory
    drafter = (Path(directory) / "config.json").read_bytes() if directory else b""
    content = [
        repr(config),
        drafter,
        settings.drafters,
        settings.types,
        settings.numerics,
        settings.attention,
        settings.max_running,
        settings.max_rows,
        settings.max_draft_rows,
        settings.policy,
        settings.sd_strategy,
        settings.page_size,
        settings.tensor_parallel,
        settings.reduction_leaves,
        settings.exchange,
        settings.drafter_parallel,
        settings.drafter_quantization,
        settings.feature_bytes > 0,
        sources("tlt_server"),
    ]
    return sha256(msgspec.json.encode(content)).hexdigest()[:16]
