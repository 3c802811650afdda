"""A GPU: Triton kernels with a fixed order of addition, captured passes, a runner that gets results
a step late.

Pushed weights are exchanged with the live ones in place, because CUDA graphs hold addresses: the
staged copy then holds the version before. `interpreter.py` is the same engine without a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from tlt_kernels.gpu import gemm
from tlt_kernels.gpu.tensors import PAGE_SIZE, BatchSlots
from tlt_kernels.gpu.upload import UploadLayout
from tlt_server.attention import GPU_BACKENDS
from tlt_server.attention.backing import Backing, give_back
from tlt_server.attention.gpu import GpuAttention
from tlt_server.attention.rows import KVCache
from tlt_server.engine.devices import Equipped, Memory, OnProgress, Quiet
from tlt_server.engine.gpu.buckets import (
    CAPTURED,
    MAX_VERIFIED,
    MIN_DEPTH,
    TREE_ROWS,
    Shapes,
    sampled_rows,
)
from tlt_server.engine.gpu.drafts import GpuDrafter, NetworkStorage
from tlt_server.engine.gpu.graphs import GraphPool
from tlt_server.engine.gpu.memory import MIB, MemoryPlan, Needs
from tlt_server.engine.gpu.refusals import check_plan, check_weights, exhausted
from tlt_server.engine.gpu.runner import GpuRunner
from tlt_server.engine.gpu.state import DeviceState, KVSlots
from tlt_server.engine.settings import DecidedSettings
from tlt_server.errors import StartupError
from tlt_server.models.config import ModelConfig
from tlt_server.models.eagle import describe, feature_layers, fill_drafter
from tlt_server.models.gpu.decoder import GpuDecoder
from tlt_server.models.gpu.eagle import GpuEagle3
from tlt_server.models.gpu.exchange import compile_exchange, exchange
from tlt_server.models.gpu.layers import Placement
from tlt_server.models.gpu.matmuls import MATMULS
from tlt_server.models.loader import eos_token_ids, fill, unread
from tlt_server.registry import load_object
from tlt_server.speculation.drafters import DRAFTERS
from tlt_server.speculation.policies.arms import Ladder
from tlt_server.speculation.survival import Calibration
from tlt_server.weights.parts import Changed, Drafter, Live, Target
from tlt_server.weights.storage import Free, disk_free, host_memory

STOPS = 8  # stop ids per request that the device knows; the host sees to the others
EXTENSIONS = 4  # upload entries for new pages, per running sequence


class CudaDevice:
    name = "cuda"
    warms_up = True
    prompts = CAPTURED

    def __init__(self, settings: DecidedSettings, device: torch.device | None = None) -> None:
        self._settings = settings
        self.device = device or torch.device("cuda", torch.cuda.current_device())
        if settings.page_size != PAGE_SIZE:
            raise StartupError(
                f"page_size is {settings.page_size}; the kernels of a GPU have pages of "
                f"{PAGE_SIZE}: leave the setting out"
            )
        self._placement = Placement(
            self.device, getattr(torch, settings.dtype), MATMULS[settings.numerics]()
        )
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._runner: GpuRunner | None = None
        self._drafters: list[GpuDrafter] = []
        self._cache: KVCache | None = None
        self._logits: list[Backing] = []  # none before there is a runner
        self._plan: MemoryPlan | None = None

    @property
    def numerics(self) -> str:
        if self._settings.numerics == "fast":
            return "fast: library matmuls as they come; exact in distribution, not bit for bit"
        return (
            "strict: kernels that add in an order fixed by the weights' shapes and absolute "
            "positions"
        )

    def load(self, config: ModelConfig) -> Live:
        self._backend(config)  # what it refuses is refused before anything is read
        settings, directory = self._settings, Path(self._settings.model)
        eagle = settings.drafter_directory
        config = eos_token_ids(config, directory)
        check_weights(settings, self._needs_before(config, eagle), *self._free())
        with self._memory("the weights"):
            target = GpuDecoder(
                config,
                placement=self._placement,
                feature_layers=feature_layers(eagle, config) if eagle else (),
            )
            fill(target.parameters(), directory, ignored=unread(config))
            live = Live(Target(settings.weight_version, target, {}))
            if eagle is None:
                return live
            network = _empty_drafter(eagle, target)
            fill_drafter(network, eagle)
        return Live(
            live.target, Drafter(settings.weight_version, network, Calibration.load(eagle), {})
        )

    def _needs_before(self, config: ModelConfig, eagle: Path | None) -> Needs:
        """Return the needs of a model and a drafter without storage."""
        nowhere = replace(self._placement, device=torch.device("meta"))
        target = GpuDecoder(
            config, placement=nowhere, feature_layers=feature_layers(eagle, config) if eagle else ()
        )
        return self._needs(target, _empty_drafter(eagle, target) if eagle else None)

    def _needs(self, target: GpuDecoder, drafter: GpuEagle3 | None) -> Needs:
        views = [*target.parameters().values(), *(drafter.parameters().values() if drafter else ())]
        return Needs.of(
            self._settings,
            target.config,
            drafter.config if drafter else None,
            sum(view.numel() for view in views),
        )

    def free(self) -> Free:
        """Count what the allocator has cached as free."""
        cached = (
            torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
            if self.device.type == "cuda"
            else 0
        )
        return Free(
            self._free()[0] + cached, host_memory().available, disk_free(self._settings.state_dir)
        )

    def install(self, live: Live, changed: Changed) -> None:
        self._synchronize()  # staging copied on another stream
        with torch.cuda.stream(self._stream):
            self._exchange(changed)
        self._synchronize()  # before another stream fills what the old version gives back

    def _synchronize(self) -> None:
        """Wait for our own streams only: others may run kernels that wait for a trainer."""
        if self._stream is not None:
            torch.cuda.default_stream(self.device).synchronize()
            self._stream.synchronize()

    def _exchange(self, changed: Changed) -> None:
        assert self._runner is not None
        if changed.target is not None:
            assert isinstance(changed.target.network, GpuDecoder)
            exchange(self._runner.state.model, changed.target.network)
            self._runner.state.model = changed.target.network
        if changed.drafter is not None:
            for drafts in self._drafters:
                drafts.install(changed.drafter)

    def allocate(self, live: Live, max_model_len: int) -> Memory:
        assert isinstance(live.target.network, GpuDecoder)
        settings, model = self._settings, live.target.network
        network = live.drafter.network if live.drafter else None
        assert network is None or isinstance(network, GpuEagle3)
        self._plan = MemoryPlan(settings, self._needs(model, network), max_model_len, *self._free())
        check_plan(self._plan)
        pages = self._plan.pages
        with self._memory(f"{pages} KV pages"):
            self._kv_slots = KVSlots(
                pages * PAGE_SIZE, max(MAX_VERIFIED, settings.max_running), TREE_ROWS
            )
            scratch = self._kv_slots.verified + 1
            self._cache = _cache(model.config, pages, scratch, self._placement, model.config.layers)
            self._draft_cache = (
                _cache(network.config, pages, scratch + self._kv_slots.tree, self._placement, 1)
                if network
                else None
            )
            self._page_hint_PH = (
                torch.zeros(
                    pages,
                    network.config.hidden_size,
                    dtype=self._placement.dtype,
                    device=self.device,
                )
                if network
                else None
            )
        return Memory(
            pages,
            self._cache.reuse,
            self._save,
            self._restore,
            self._free_pages,
            self._reclaim_pages,
        )

    def _save(self, pages: list[int]) -> object:
        """Copy pages after the step in flight, which may still write there."""
        with torch.cuda.stream(self._stream):
            hints = None if self._page_hint_PH is None else self._page_hint_PH[pages].cpu()
            return [cache.save(pages) for cache in self._caches], hints

    def _restore(self, saved: object, pages: list[int]) -> None:
        """Write pages between the step in flight, which may still write there, and the next."""
        assert isinstance(saved, tuple)
        kept, hints = saved
        with torch.cuda.stream(self._stream):
            for cache, pieces in zip(self._caches, kept, strict=True):
                cache.restore(pieces, pages)
            if self._page_hint_PH is not None:
                self._page_hint_PH[pages[: len(hints)]] = hints.to(self.device)

    @property
    def _lent(self) -> list[KVCache | Backing]:
        """Return what a sleep gives back, apart from graphs."""
        return [*self._caches, *self._logits]

    def _free_pages(self) -> None:
        if self._runner is not None:
            # Graphs hold addresses; keys are recorded again as they are used.
            self._runner.graphs.clear()
        for part in self._lent:
            part.free()
        give_back()

    def _reclaim_pages(self) -> None:
        try:
            for part in self._lent:
                part.reclaim()
        except torch.OutOfMemoryError:
            self._free_pages()
            raise

    @property
    def _caches(self) -> list[KVCache]:
        assert self._cache is not None
        return [self._cache, *([self._draft_cache] if self._draft_cache is not None else [])]

    def equip(
        self,
        live: Live,
        ladder: Ladder,
        page_table_SP: NDArray[np.int32],
        on_progress: OnProgress,
        quiet: Quiet,
    ) -> Equipped:
        assert isinstance(live.target.network, GpuDecoder) and self._cache is not None
        settings, model = self._settings, live.target.network
        with self._memory("buffers and graphs"):
            shapes = Shapes(
                settings.max_running,
                max(MIN_DEPTH, *(arm.depth for arm in ladder.arms)),
                self.prompts,
            )
            state = self._state(model, shapes, page_table_SP.shape[1])
            attention = self._backend(model.config)
            storage = self._network_storage(live)
            drafters = {
                name: load_object(DRAFTERS[name].gpu.implementation).make(state, storage)
                for name in ladder.drafters
            }
            self._drafters = list(drafters.values())
            capture = settings.graphs and attention.capturable and self._stream is not None
            self._runner = GpuRunner(
                state,
                attention,
                drafters,
                GraphPool(self._stream if capture else None, quiet=quiet),
                shapes=shapes,
                stream=self._stream,
                page_hint_PH=self._page_hint_PH,
            )
            self._synchronize()  # what the runner's stream will read was written on another
            if capture:
                self._runner.prepare(
                    shapes.at_start(settings.max_rows, ladder.arms, ladder.rows), on_progress
                )
            if self._stream is not None:
                for part in live.by_role.values():
                    assert isinstance(part.network, GpuDecoder | GpuEagle3)
                    compile_exchange(part.network)
        graphs = self._runner.graphs
        taken = (
            f"{len(graphs.bytes)} graphs, {graphs.total_bytes // MIB} MiB, "
            f"{sum(graphs.seconds.values()):.1f} s"
        )
        matmuls = gemm.in_use(self._placement.dtype, self.device, model.config.intermediate_size)
        return Equipped(
            self._runner,
            lambda sequence: None,
            taken if capture else "launched kernel by kernel",
            matmuls,
            shapes.room,
        )

    def _state(self, model: GpuDecoder, shapes: Shapes, pages_per_sequence: int) -> DeviceState:
        batch, tokens = shapes.max_running, pages_per_sequence * PAGE_SIZE
        assert self._cache is not None
        layout = UploadLayout(
            batch=batch,
            chunks=shapes.max_chunks,
            admissions=max(16, batch),
            extensions=EXTENSIONS * batch,
            stops=STOPS,
            payload=max(65536, 2 * tokens),
            idle=batch,
        )
        batch_slots = BatchSlots.allocate(
            batch + 1,
            tokens,
            hidden=self._hidden,
            stops=STOPS,
            dtype=self._placement.dtype,
            device=self.device.type,
        )
        upload_U = torch.zeros(layout.size, dtype=torch.int32, device=self.device)
        logits_SV = torch.empty(
            sampled_rows(batch), model.vocab_size, dtype=torch.float32, device=self.device
        )
        self._logits = [Backing(logits_SV)]
        return DeviceState(
            model,
            self._cache,
            self._kv_slots,
            batch_slots,
            layout,
            upload_U,
            logits_SV,
            shapes.depth,
        )

    @property
    def _hidden(self) -> int:
        return self._page_hint_PH.shape[1] if self._page_hint_PH is not None else 1

    def _backend(self, config: ModelConfig) -> GpuAttention:
        return GPU_BACKENDS.resolve(self._settings.attention)(
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            context=config.max_position,
            device=self.device,
            dtype=self._placement.dtype,
            numerics=self._settings.numerics,
        )

    def _network_storage(self, live: Live) -> NetworkStorage | None:
        if live.drafter is None:
            return None
        assert self._draft_cache is not None and self._page_hint_PH is not None
        return NetworkStorage(
            live.drafter,
            self._draft_cache,
            self._backend(live.drafter.network.config),
            self._page_hint_PH,
        )

    def _free(self) -> tuple[int, int]:
        """Return the bytes of the device: free, and in all."""
        return torch.cuda.mem_get_info(self.device)

    @contextmanager
    def _memory(self, what: str) -> Iterator[None]:
        """Turn the allocator's error into one that names the remedy."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            free, total = self._free()
            raise StartupError(
                exhausted(self._plan, what, str(error), free=free, total=total)
            ) from error


def _empty_drafter(directory: Path, target: GpuDecoder) -> GpuEagle3:
    described = describe(directory, target)
    return GpuEagle3(
        described.config, described.draft_vocab_size, target, own_embedding=described.own_embedding
    )


def _cache(
    config: ModelConfig, pages: int, scratch: int, placement: Placement, layers: int
) -> KVCache:
    return KVCache(
        layers=layers,
        pages=pages,
        page_size=PAGE_SIZE,
        scratch=scratch,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        dtype=placement.dtype,
        device=str(placement.device),
    )
