"""The kernels of one start: compiled ahead, in parallel with the load of the weights where a record
says which, else once a rehearsal has listed them.

A start that finds all of them in Triton's cache does neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import msgspec

from tlt_kernels.gpu.variants import Variant
from tlt_server.engine.gpu.compiling import ParallelCompiler
from tlt_server.engine.gpu.kernel_records import (
    cache_directory,
    read_record,
    record_name,
    recorded,
    sources,
    toolchain,
)
from tlt_server.engine.settings import DecidedSettings
from tlt_server.models.config import ModelConfig

WARP = 32


class KernelStart:
    def __init__(self, engine: str) -> None:
        """`engine`: see `engine_digest`. Starts to compile, or to get ready for it."""
        self._engine, self._toolchain, self._cache = engine, toolchain(), cache_directory()
        name = record_name(self._toolchain, engine)
        self._known = read_record(self._cache, name)
        self.compiled = 0
        self._compiler: ParallelCompiler | None = None
        target = ("cuda", int(self._toolchain["capability"].replace(".", "")), WARP)
        if self._known is None:
            self._compiler = ParallelCompiler(target)
        elif not (self._known.started and self._known.complete(self._cache)):
            self._compiler = ParallelCompiler(
                target, [Variant(k.module, k.kernel, k.specialization) for k in self._known.kernels]
            )

    def compile(
        self, rehearse: Callable[[], list[Variant]], on_progress: Callable[[int, int], None]
    ) -> None:
        """Wait for the kernels; `rehearse` lists them where no record does."""
        if self._compiler is None:
            return
        if self._known is None:
            self._compiler.compile(rehearse())
        self.compiled = self._compiler.wait(on_progress)
        self._compiler = None

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record what the block loads, for the next start."""
        with recorded(self._cache, self._known, self._toolchain, self._engine):
            yield


def engine_digest(settings: DecidedSettings, config: ModelConfig) -> str:
    """Return a digest of all that decides which kernels an engine needs, apart from the
    toolchain.
    """
    directory = settings.drafter_directory
    drafter = (Path(directory) / "config.json").read_bytes() if directory else b""
    content = [
        repr(config),
        drafter,
        settings.drafters,
        settings.dtype,
        settings.numerics,
        settings.attention,
        settings.max_running,
        settings.max_rows,
        settings.max_draft_rows,
        settings.policy,
        settings.sd_strategy,
        settings.page_size,
        sources("tlt_server"),
    ]
    return sha256(msgspec.json.encode(content)).hexdigest()[:16]
