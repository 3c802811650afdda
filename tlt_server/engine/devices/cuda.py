"""A GPU: Triton kernels with a fixed order of addition, captured passes, a runner that gets results
a step late.

Pushed weights are exchanged with the live ones in place, because CUDA graphs hold addresses: the
staged copy then holds the version before. `interpreter.py` is the same engine without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from tlt_kernels.gpu import gemm
from tlt_kernels.gpu.tensors import PAGE_SIZE, BatchSlots
from tlt_kernels.gpu.upload_layout import UploadLayout
from tlt_server.attention import GPU_BACKENDS
from tlt_server.attention.backing import Backing, give_back
from tlt_server.attention.gpu import GpuAttention
from tlt_server.attention.rows import KVCache
from tlt_server.engine.devices import Equipped, Memory, OnProgress, Quiet
from tlt_server.engine.devices.fingerprints import GPU_PROMISES, of_gpu
from tlt_server.engine.devices.training import describe_share
from tlt_server.engine.gpu.buckets import (
    CAPTURED,
    MAX_VERIFIED,
    MIN_DEPTH,
    TREE_ROWS,
    Shapes,
    sampled_rows,
)
from tlt_server.engine.gpu.capture import describe, make_states
from tlt_server.engine.gpu.drafts import DraftKey, GpuDrafter, NetworkStorage
from tlt_server.engine.gpu.extend import ExtendKey
from tlt_server.engine.gpu.graphs import GraphPool
from tlt_server.engine.gpu.idle import IdleRecorder
from tlt_server.engine.gpu.kernel_start import KernelStart, engine_digest
from tlt_server.engine.gpu.kv import DraftKV, GpuKV, make_cache
from tlt_server.engine.gpu.memory import MemoryPlan, Needs
from tlt_server.engine.gpu.page_states import PageStates
from tlt_server.engine.gpu.preparing import load_exchange, prepare
from tlt_server.engine.gpu.recordings import GraphRecordings
from tlt_server.engine.gpu.refusals import check_plan, check_weights, exhausted
from tlt_server.engine.gpu.runner import GpuRunner
from tlt_server.engine.gpu.state import SCORED, DeviceState, KVSlots
from tlt_server.engine.gpu.texts import Texts
from tlt_server.engine.sampling import MAX_LISTED
from tlt_server.engine.settings import DecidedSettings
from tlt_server.errors import StartupError
from tlt_server.fingerprint import Fingerprint
from tlt_server.machine import host_memory
from tlt_server.models.config import ModelConfig
from tlt_server.models.gpu.adapted import GpuAdapterSlots
from tlt_server.models.gpu.decoder import GpuDecoder
from tlt_server.models.gpu.exchange import exchange
from tlt_server.models.gpu.layers import Placement
from tlt_server.models.gpu.matmuls import MATMULS
from tlt_server.models.loader import eos_token_ids, fill, unread
from tlt_server.registry import load_object
from tlt_server.speculation.drafters import DRAFTERS
from tlt_server.speculation.drafters.loading import find_loader
from tlt_server.speculation.sizes import Reach
from tlt_server.weights.parts import Changed, Drafter, DrafterNetwork, Live, Target
from tlt_server.weights.storage import Free, disk_free

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
        self._kernels: KernelStart | None = None  # where launches are captured at start
        depth, adapters = max(MIN_DEPTH, settings.deepest), settings.max_loras > 0
        self.sizes = Shapes(settings.max_running, depth, self.prompts, adapters)
        self._adapters: GpuAdapterSlots | None = None
        self.recordings = GraphRecordings(self.sizes)

    @property
    def numerics(self) -> str:
        return GPU_PROMISES[self._settings.numerics]

    @property
    def fingerprint(self) -> Fingerprint:
        return of_gpu(self._settings, self.device)

    def load(self, config: ModelConfig) -> Live:
        attention = self._backend(config)  # refuses before anything is read
        settings, directory = self._settings, Path(self._settings.model)
        config = eos_token_ids(config, directory)
        nowhere = replace(self._placement, device=torch.device("meta"))
        check_weights(settings, self._needs(*self._empty(config, nowhere)), *self._free())
        if self._captures(attention):
            self._kernels = KernelStart(engine_digest(settings, config))
        with self._memory("the weights"):
            target, network = self._empty(config, self._placement)
            fill(target.parameters(), directory, ignored=unread(config))
            live = Live(Target.loaded(settings.weight_version, target, directory))
            if network is None or (drafter := settings.drafter_directory) is None:
                return live
            loader = find_loader(drafter, self.name)
            loader.fill(network, drafter)
        version, calibration = settings.weight_version, loader.calibration(drafter)
        return replace(live, drafter=Drafter.loaded(version, network, calibration, drafter))

    def _empty(
        self, config: ModelConfig, placement: Placement
    ) -> tuple[GpuDecoder, DrafterNetwork | None]:
        """Return target and drafter, not filled."""
        directory = self._settings.drafter_directory
        if directory is None:
            return GpuDecoder(config, placement=placement), None
        loader = find_loader(directory, self.name)
        layers = loader.feature_layers(directory, config)
        target = GpuDecoder(config, placement=placement, feature_layers=layers)
        return target, loader.empty(directory, target)

    def _needs(self, target: GpuDecoder, drafter: DrafterNetwork | None) -> Needs:
        views = [*target.parameters().values(), *(drafter.parameters().values() if drafter else ())]
        values = sum(view.numel() for view in views)
        return Needs.of(self._settings, target.config, drafter, values, target.feature_width)

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

    def _synchronize(self) -> None:
        """Wait for our own streams only: others may run kernels that wait for a trainer."""
        if self._stream is not None:
            torch.cuda.default_stream(self.device).synchronize()
            self._stream.synchronize()

    def allocate(self, live: Live, max_model_len: int) -> Memory:
        assert isinstance(live.target.network, GpuDecoder)
        settings, model = self._settings, live.target.network
        network = live.drafter.network if live.drafter else None
        if settings.max_loras:
            with self._memory(f"{settings.max_loras} LoRA adapters"):
                self._adapters = GpuAdapterSlots(
                    model.config, settings.max_loras, settings.max_lora_rank, self._placement
                )
                for adapter in live.adapters.values():
                    self._adapters.fill(adapter.slot, adapter.network)
        plan = MemoryPlan(settings, self._needs(model, network), max_model_len, *self._free())
        check_plan(plan)
        pages = plan.pages
        with self._memory(f"{pages} KV pages", plan):
            slots = KVSlots(pages * PAGE_SIZE, max(MAX_VERIFIED, settings.max_running), TREE_ROWS)
            scratch = slots.verified + 1
            cache = make_cache(model.config, pages, scratch, self._placement, model.config.layers)
            draft = None
            if network:
                draft = DraftKV(
                    make_cache(network.config, pages, scratch + slots.tree, self._placement, 1),
                    torch.zeros(
                        pages,
                        network.config.hidden_size,
                        dtype=self._placement.dtype,
                        device=self.device,
                    ),
                )
            states = make_states(plan, model, self._placement, streams=self._stream is not None)
        kv = GpuKV(plan, slots, cache, draft, self._stream, states)
        memory = Memory(pages, cache.reuse, kv.save, kv.restore, kv)
        if states is None or network is None:
            return memory
        cache.on_reuse.append(states.reuse)
        detail = describe(plan) + describe_share(settings, network)
        return replace(memory, states=states, detail=detail)

    def equip(
        self,
        live: Live,
        memory: Memory,
        reach: Reach,
        page_table_SP: NDArray[np.int32],
        on_progress: OnProgress,
        quiet: Quiet,
    ) -> Equipped:
        assert isinstance(live.target.network, GpuDecoder) and isinstance(memory.kv, GpuKV)
        settings, model, kv = self._settings, live.target.network, memory.kv
        with self._memory("buffers and graphs", kv.plan):
            state = self._state(model, kv, self.sizes, page_table_SP.shape[1])
            attention = self._backend(model.config)
            storage = self._network_storage(live, kv)
            drafters = {
                name: load_object(DRAFTERS[name].gpu.implementation).make(state, storage)
                for name in settings.drafters
            }
            captures = self._captures(attention)
            runner = GpuRunner(
                state,
                attention,
                drafters,
                GraphPool(self._stream if captures else None, quiet=quiet),
                Texts.of(state.batch_slots, kept=bool(drafters)),
                shapes=self.sizes,
                stream=self._stream,
                page_hint_PH=kv.page_hint_PH,
                states=kv.states,
            )
            self._synchronize()  # what the runner's stream will read was written on another
            self._prepare(runner, live, self.sizes.at_start(settings.max_rows, reach), on_progress)
        graphs = runner.graphs
        self.recordings.follow(graphs)
        buffers = state.logits_SV, state.batch_slots.count_QV
        lent: tuple[KVCache | Backing, ...] = (*kv.caches, *(Backing(each) for each in buffers))
        if kv.states is not None:
            lent = (*lent, Backing(kv.states.ring.state_CX))
        equipment = GpuEquipment(
            runner, tuple(drafters.values()), lent, self._synchronize, kv.states
        )
        taken = (
            f"{len(graphs.bytes)} graphs, {graphs.total_bytes // 2**20} MiB, "
            f"{sum(graphs.seconds.values()):.1f} s"
        )
        compiled = self._kernels.compiled if self._kernels else 0
        ahead = f", {compiled} kernels compiled ahead" if compiled else ""
        matmuls = gemm.in_use(self._placement.dtype, self.device, model.config.intermediate_size)
        return Equipped(
            runner,
            runner.texts.end,
            equipment.install,
            equipment.free,
            equipment.reclaim,
            runner.forget,
            runner.tables,
            f"{taken}{ahead}" if captures else "launched kernel by kernel",
            matmuls,
            self.sizes.room,
            IdleRecorder(runner, self.recordings),
        )

    def _captures(self, attention: GpuAttention) -> bool:
        return self._settings.graphs and attention.capturable and self._stream is not None

    def _prepare(
        self,
        runner: GpuRunner,
        live: Live,
        keys: list[DraftKey | ExtendKey],
        on_progress: OnProgress,
    ) -> None:
        """Load every kernel that a step or a push launches, and capture the steps of these keys."""
        networks = [part.network for part in live.by_role.values()]
        if self._kernels is not None:
            fast = self._settings.numerics != "strict"
            prepare(runner, self._kernels, networks, keys, on_progress, run_first=fast)
        elif self._stream is not None:
            load_exchange(networks)

    def _state(
        self, model: GpuDecoder, kv: GpuKV, shapes: Shapes, pages_per_sequence: int
    ) -> DeviceState:
        batch, tokens = shapes.max_running, pages_per_sequence * PAGE_SIZE
        layout = UploadLayout(
            batch=batch,
            chunks=shapes.max_chunks,
            admissions=max(16, batch),
            extensions=EXTENSIONS * batch,
            stops=STOPS,
            payload=max(65536, 2 * tokens) + 2 * MAX_LISTED,
            idle=batch,
            listed=MAX_LISTED,
            texts=kv.plan.text_slots,
        )
        batch_slots = BatchSlots.allocate(
            batch + 1,
            tokens,
            texts=kv.plan.text_slots,
            hidden=kv.page_hint_PH.shape[1] if kv.page_hint_PH is not None else 1,
            stops=STOPS,
            listed=MAX_LISTED,
            vocabulary=model.vocab_size,
            dtype=self._placement.dtype,
            device=self.device.type,
        )
        upload_U = torch.zeros(layout.size, dtype=torch.int32, device=self.device)
        rows = shapes.most_rows(self._settings.max_rows) + SCORED
        hidden_RH = self._placement.empty(rows, model.hidden_size)
        logits_SV = torch.empty(
            sampled_rows(batch), model.vocab_size, dtype=torch.float32, device=self.device
        )
        return DeviceState(
            model,
            kv.cache,
            kv.slots,
            batch_slots,
            layout,
            upload_U,
            hidden_RH,
            logits_SV,
            shapes.depth,
            self._adapters,
        )

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

    def _network_storage(self, live: Live, kv: GpuKV) -> NetworkStorage | None:
        if live.drafter is None or kv.draft is None:
            return None
        attention, held = self._backend(live.drafter.network.config), self._settings.records
        return NetworkStorage(live.drafter, kv.draft.cache, attention, kv.draft.page_hint_PH, held)

    def _free(self) -> tuple[int, int]:
        """Return the bytes of the device: free, and in all."""
        return torch.cuda.mem_get_info(self.device)

    @contextmanager
    def _memory(self, what: str, plan: MemoryPlan | None = None) -> Iterator[None]:
        """Turn the allocator's error into one that names the remedy; `plan`: of KV, if it is
        made.
        """
        try:
            yield
        except torch.OutOfMemoryError as error:
            free, total = self._free()
            raise StartupError(exhausted(plan, what, str(error), free=free, total=total)) from error


@dataclass(frozen=True)
class GpuEquipment:
    """The runner with all that pushes exchange and sleeps give back."""

    runner: GpuRunner
    drafters: tuple[GpuDrafter, ...]
    lent: tuple[KVCache | Backing, ...]  # what a sleep gives back, apart from graphs
    synchronize: Callable[[], None]
    states: PageStates | None

    def install(self, live: Live, changed: Changed) -> None:
        self.synchronize()  # staging copied on another stream
        with torch.cuda.stream(self.runner.stream):
            self._exchange(live, changed)
        self.synchronize()  # before another stream fills what the old version gives back

    def _exchange(self, live: Live, changed: Changed) -> None:
        if changed.target is not None:
            assert isinstance(changed.target.network, GpuDecoder)
            exchange(self.runner.state.model, changed.target.network)
            self.runner.state.model = changed.target.network
        if changed.drafter is not None:
            for drafts in self.drafters:
                drafts.install(changed.drafter)
        if changed.adapter is not None:
            assert self.runner.state.adapters is not None
            adapter = live.adapters[changed.adapter.name]
            self.runner.state.adapters.fill(adapter.slot, adapter.network)

    def free(self) -> None:
        if self.states is not None:
            self.states.settle()  # copies read the ring
        # Graphs hold addresses; keys are recorded again as they are used.
        self.runner.graphs.clear()
        for part in self.lent:
            part.free()
        give_back()

    def reclaim(self) -> None:
        try:
            for part in self.lent:
                part.reclaim()
        except torch.OutOfMemoryError:
            self.free()
            raise
