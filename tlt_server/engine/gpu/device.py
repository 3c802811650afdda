"""A GPU: Triton kernels with a fixed order of addition, captured passes, and a runner that gets
results one step late.

Pushed weights are swapped with the live ones in place, because CUDA graphs hold addresses: the
staged copy then holds the previous version. `Interpreted` is the same engine without a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from tlt_kernels import versions
from tlt_kernels.gpu import gemm
from tlt_kernels.gpu.tensors import PAGE_SIZE
from tlt_server.engine.devices import Equipment, Memory, RunnerSetup, compiled
from tlt_server.engine.devices.choice import gpu_split, wider_settings
from tlt_server.engine.devices.training import describe_share
from tlt_server.engine.gpu.equipment import GpuEquipment, IdleRecorder
from tlt_server.engine.gpu.link import ALONE, GpuLink, StepWaits
from tlt_server.engine.gpu.memory.budget import MemoryPlan
from tlt_server.engine.gpu.memory.hidden_states import StateCapture, describe, make_states
from tlt_server.engine.gpu.memory.kv import GpuKV
from tlt_server.engine.gpu.memory.refusals import check_plan, exhausted, widen
from tlt_server.engine.gpu.orders import Equip, ReportMemory
from tlt_server.engine.gpu.runner import RING, GpuRunner
from tlt_server.engine.gpu.start.kernel_start import KernelStart, engine_digest
from tlt_server.engine.gpu.start.maker import GpuMaker, Lent
from tlt_server.engine.gpu.start.planning import (
    empty_networks,
    needs_of,
    needs_wider,
    plan_start,
    window_sizes,
)
from tlt_server.engine.gpu.start.recordings import GraphRecordings
from tlt_server.engine.gpu.start.strategy_kernels import StrategyKernels
from tlt_server.engine.gpu.steps.buckets import CAPTURED, PromptShape
from tlt_server.engine.gpu.steps.drafts import DraftKey
from tlt_server.engine.gpu.steps.extend import ExtendKey
from tlt_server.engine.gpu.steps.texts import Texts
from tlt_server.engine.phases import OnProgress
from tlt_server.engine.ranks.orders import NO_RANKS, Allocate, Drop, RankOrders
from tlt_server.engine.ranks.ranks import Ranks
from tlt_server.engine.ranks.shared_models import key_of, share
from tlt_server.engine.settings import DecidedSettings
from tlt_server.errors import StartupError
from tlt_server.models.config import ModelConfig
from tlt_server.models.gpu.adapted import GpuAdapterSlots
from tlt_server.models.gpu.decoder import GpuDecoder
from tlt_server.models.loader import eos_token_ids, fill_target
from tlt_server.models.shards import rank_config
from tlt_server.process.machine import host_memory
from tlt_server.speculation.drafters import find_loader
from tlt_server.weights.parts import Drafter, Live, Target
from tlt_server.weights.storage import Free, disk_free
from tlt_server.wire.fingerprint import Fingerprint

GPU_PROMISES = {  # by numerics
    "fast": "fast: library matmuls as they come; exact in distribution, not bit for bit",
    "strict": "strict: kernels that add in an order fixed by the weights' shapes and absolute "
    "positions",
}


class CudaDevice:
    name = "cuda"
    warms_up = True
    prompts = CAPTURED

    def __init__(self, settings: DecidedSettings, device: torch.device | None = None) -> None:
        self._settings = settings
        self.device = device or torch.device("cuda", torch.cuda.current_device())
        if settings.page_size != PAGE_SIZE:
            raise StartupError(
                f"page_size is {settings.page_size}; GPU kernels need pages of "
                f"{PAGE_SIZE}: leave the setting out"
            )
        self._maker = GpuMaker.of(settings, self.device, self.prompts)
        self.sizes = self._maker.sizes
        self._kernels: KernelStart | None = None  # where launches are captured at start
        self._ranks: RankOrders = NO_RANKS
        self._waits: StepWaits = ALONE
        self.recordings = GraphRecordings(self.sizes)

    @property
    def numerics(self) -> str:
        return GPU_PROMISES[self._settings.numerics]

    @property
    def fingerprint(self) -> Fingerprint:
        return of_gpu(self._settings, self.device)

    def compile(self, on_progress: OnProgress) -> str:
        """Prepare the checksums of weights that are staged in host memory. The GPU's kernels are
        compiled while the weights load.
        """
        return compiled(("checksums",), on_progress)

    def load(self, config: ModelConfig) -> Live:
        settings, directory = self._settings, Path(self._settings.model)
        split = gpu_split(settings, config)
        # Refuses before anything is read.
        attention = self._maker.backend(rank_config(config, split))
        config = eos_token_ids(config, directory)
        plan_start(settings, config, self.sizes, *self._usable())
        if self._maker.captures(attention):
            self._kernels = KernelStart(engine_digest(settings, config))
        if settings.tensor_parallel > 1:
            split = share(self._start_ranks(config), split)
        with self._memory("the weights", config):
            placement = self._maker.placement
            target, network = empty_networks(settings, config, placement, split)
            fill_target(target.parameters(), config, settings.checkpoint)
            live = Live(Target.loaded(settings.weight_version, target, settings.checkpoint))
            if network is None or (drafter := settings.drafter_directory) is None:
                return live
            loader = find_loader(drafter, self.name)
            loader.fill(network, drafter)
        version, calibration = settings.weight_version, loader.calibration(drafter)
        return replace(live, drafter=Drafter.loaded(version, network, calibration, drafter))

    def _start_ranks(self, config: ModelConfig) -> Ranks[GpuLink]:
        settings = self._settings
        sizes = window_sizes(settings, config, self.sizes)
        connect = partial(GpuLink, device=self.device, sizes=sizes, by=settings.exchange)
        with self._memory("the windows of ranks", config):
            ranks = Ranks(settings, connect)
        self._ranks, self._waits = ranks, ranks.link
        self._maker = self._maker.shared(ranks.link.agreement)
        return ranks

    def free(self) -> Free:
        """Return the memory for a staged version. Each rank has as much for its shard."""
        least = min([self._usable()[0], *(free for free, _ in self._free_of_others())])
        free = self._settings.tensor_parallel * least
        return Free(free, host_memory().available, disk_free(self._settings.state_dir))

    def allocate(self, live: Live, max_model_len: int) -> Memory:
        assert isinstance(live.target.network, GpuDecoder)
        settings, model = self._settings, live.target.network
        network = live.drafter.network if live.drafter else None
        if network is not None:
            network.follow(model)  # a restart may have loaded another before
        adapters: GpuAdapterSlots | None = None
        if settings.max_loras:
            with self._memory(f"{settings.max_loras} LoRA adapters", model.config):
                adapters = GpuAdapterSlots(
                    model.config, settings.max_loras, settings.max_lora_rank, self._maker.placement
                )
                for adapter in live.adapters.values():
                    adapters.fill(adapter.slot, adapter.network)
        room = min([self._free(), *self._free_of_others()])
        needs = needs_of(settings, self.sizes, model, network)
        plan = MemoryPlan(settings, needs, max_model_len, *room)
        check_plan(plan, partial(needs_wider, settings, model.config, self.sizes))
        pages = plan.pages
        with self._memory(f"{pages} KV pages", model.config, plan):
            streams = self._maker.stream is not None
            states = make_states(plan, model, self._maker.placement, streams=streams)
            kv = self._maker.kv(plan, pages, model, network)
            kv = replace(kv, states=states, adapters=adapters)
            models = key_of(model), key_of(network) if network else 0
            self._ranks.order(Allocate(*models, pages, max_model_len), wait=True)
        cache = kv.cache
        own = self._waits.drained(kv.stream, kv.save)
        save, restore = self._ranks.copiers(own, kv.restore)
        memory = Memory(pages, cache.reuse, save, restore, kv)
        if states is None or network is None:
            return memory
        cache.on_reuse.append(states.reuse)
        detail = describe(plan) + describe_share(settings, network)
        return replace(memory, states=states, detail=detail)

    def equip(self, setup: RunnerSetup) -> Equipment:
        live, memory = setup.live, setup.memory
        assert isinstance(live.target.network, GpuDecoder) and isinstance(memory.kv, GpuKV)
        settings, model, kv = self._settings, live.target.network, memory.kv
        with self._memory("buffers and graphs", model.config, kv.plan):
            pages_per_sequence = setup.page_table_SP.shape[1]
            state = self._maker.state(model, kv, pages_per_sequence)
            capture = None
            if kv.states is not None:
                pinned = state.upload_U.device.type == "cuda"
                capture = StateCapture(kv.states, steps=RING, pinned=pinned)
            passes = self._maker.passes(
                state,
                kv,
                live.drafter,
                quiet=setup.quiet,
                drain=self._waits.drain,
                readers=[capture] if capture else [],
            )
            texts = Texts.of(state.batch_slots, kept=bool(passes.drafters))
            runner = GpuRunner(passes, texts, capture=capture, ranks=self._ranks, waits=self._waits)
            # What the runner's stream will read was written on another.
            self._maker.synchronize()
            keys = self.sizes.at_start(settings.max_rows, setup.reach)
            self._prepare(runner, live, keys, pages_per_sequence, setup.on_progress)
        graphs = runner.graphs
        self.recordings.follow(graphs)
        taken = (
            f"{len(graphs.bytes)} graphs, {graphs.total_bytes // 2**20} MiB, "
            f"{sum(graphs.seconds.values()):.1f} s"
        )
        compiled = self._kernels.compiled if self._kernels else 0
        ahead = f", {compiled} kernels compiled ahead" if compiled else ""
        detail = f"{taken}{ahead}" if graphs.captures else "launched kernel by kernel"
        part = live.drafter.network.part if live.drafter else None
        if settings.tensor_parallel > 1 and part is not None:
            shared = part.split.of > 1
            detail += f"; the drafter is {'shared by' if shared else 'whole on'} all ranks"
        dtype, intermediate = self._maker.placement.dtype, model.own_config.intermediate_size
        return GpuEquipment(
            runner,
            Lent(passes, kv),
            self._maker.synchronize,
            IdleRecorder(runner, self.recordings),
            StrategyKernels(runner, self._kernels, keys) if self._kernels else None,
            detail,
            gemm.in_use(dtype, self.device, intermediate),
        )

    def _prepare(
        self,
        runner: GpuRunner,
        live: Live,
        keys: list[DraftKey | ExtendKey],
        pages_per_sequence: int,
        on_progress: OnProgress,
    ) -> None:
        """Prepare all ranks. The other ranks find the compiled kernels in Triton's cache."""
        drafts = [key for key in keys if isinstance(key, DraftKey)]
        extends = [key for key in keys if isinstance(key, ExtendKey)]
        order = Equip(pages_per_sequence, drafts, extends)
        networks = [part.network for part in live.by_role.values()]
        self._maker.prepare(
            runner,
            self._kernels,
            networks,
            keys,
            on_progress,
            on_compiled=lambda: self._ranks.begin(order),
        )
        self._waits.begin()

    def _free_of_others(self) -> list[tuple[int, int]]:
        """Return (free, total) bytes of each other rank's GPU."""
        self._ranks.order(Drop([], []), wait=True)  # frees what has been dropped
        texts = self._ranks.ask(ReportMemory())
        return [(int(free), int(total)) for free, total in (text.split() for text in texts)]

    def _usable(self) -> tuple[int, int]:
        """Return (usable, total) bytes of the device; memory cached by the allocator is usable."""
        free, total = self._free()
        if self.device.type == "cuda":
            cached = torch.cuda.memory_reserved(self.device)
            free += cached - torch.cuda.memory_allocated(self.device)
        return free, total

    def _free(self) -> tuple[int, int]:
        """Return (free, total) bytes of the device."""
        return torch.cuda.mem_get_info(self.device)

    @contextmanager
    def _memory(
        self, what: str, config: ModelConfig, plan: MemoryPlan | None = None
    ) -> Iterator[None]:
        """Turn the allocator's error into one that names the remedy. `plan`: of the KV, if it was
        made.
        """
        try:
            yield
        except torch.OutOfMemoryError as error:
            free, total = self._free()
            widths = wider_settings(self._settings, config)
            wider = widen(self._settings, widths[0]) if widths else ""
            raise StartupError(
                exhausted(plan, what, str(error), free=free, total=total, wider=wider)
            ) from error


class Interpreted(CudaDevice):
    """The same engine on Triton's CPU interpreter, for tests."""

    name = "interpreter"
    warms_up = False  # nothing is compiled
    # Small, as a padded row costs as much as a real one.
    prompts = PromptShape(sizes=(2, 4), chunks=2, grain=4)

    def __init__(self, settings: DecidedSettings) -> None:
        super().__init__(settings, torch.device("cpu"))

    def _free(self) -> tuple[int, int]:
        return 2**40, 2**40


def of_gpu(settings: DecidedSettings, device: torch.device) -> Fingerprint:
    """`device`: a CPU where Triton's interpreter computes."""
    architecture = "interpreter"
    if device.type == "cuda":
        architecture = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
    how = f"{settings.numerics} {versions.GPU}"
    given = settings.reduction_leaves, settings.types, architecture, how, settings.attention
    return Fingerprint(*given, settings.quantization)
