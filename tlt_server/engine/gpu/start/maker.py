"""Makes a rank's objects on its GPU: KV, state, drafters and passes. Rank 0's device and the worker
ranks share this code, so their passes have the same shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from tlt_kernels.gpu.tensors import PAGE_SIZE, BatchSlots
from tlt_kernels.gpu.upload_layout import UploadLayout
from tlt_server.attention import GPU_BACKENDS
from tlt_server.attention.backing import Backing, give_back
from tlt_server.attention.gpu import GpuAttention
from tlt_server.attention.rows import KVCache
from tlt_server.engine.gpu.memory.budget import MemoryPlan
from tlt_server.engine.gpu.memory.graphs import GraphPool, synchronize
from tlt_server.engine.gpu.memory.kv import DraftKV, GpuKV
from tlt_server.engine.gpu.passes import Passes
from tlt_server.engine.gpu.start.kernel_start import KernelStart
from tlt_server.engine.gpu.start.planning import placement_on, shapes_of
from tlt_server.engine.gpu.start.preparing import Keys, StepRunner, load_exchange, prepare
from tlt_server.engine.gpu.steps.agreement import Agreement
from tlt_server.engine.gpu.steps.buckets import (
    MAX_VERIFIED,
    TREE_ROWS,
    PromptShape,
    Shapes,
    sampled_rows,
)
from tlt_server.engine.gpu.steps.drafts import GpuDrafter, NetworkStorage, RowReader
from tlt_server.engine.gpu.steps.head import SharedHead
from tlt_server.engine.gpu.steps.state import SCORED, DeviceState, KVSlots
from tlt_server.engine.phases import OnProgress
from tlt_server.engine.sampling.sampler import MAX_LISTED
from tlt_server.engine.settings import DecidedSettings
from tlt_server.models.config import ModelConfig
from tlt_server.models.gpu.decoder import GpuDecoder
from tlt_server.models.gpu.placement import Placement
from tlt_server.models.gpu.sums import RankSums
from tlt_server.registry import load_object
from tlt_server.speculation.drafters import DRAFTERS, networked
from tlt_server.weights.parts import Drafter, DrafterNetwork

STOPS = 8  # stop ids per request that the device knows; the host sees to the others
EXTENSIONS = 4  # upload entries for new pages, per running sequence


@dataclass(frozen=True)
class GpuMaker:
    settings: DecidedSettings
    device: torch.device
    placement: Placement
    sizes: Shapes
    stream: torch.cuda.Stream | None
    agreement: Agreement | None = None  # None: there is one rank

    @classmethod
    def of(cls, settings: DecidedSettings, device: torch.device, prompts: PromptShape) -> GpuMaker:
        stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        placement, sizes = placement_on(device, settings), shapes_of(settings, prompts)
        return cls(settings, device, placement, sizes, stream)

    def shared(self, agreement: Agreement) -> GpuMaker:
        """Return a maker whose targets sum their layers over the ranks."""
        placement = replace(self.placement, sums=RankSums(agreement.peers))
        return replace(self, placement=placement, agreement=agreement)

    def backend(self, config: ModelConfig) -> GpuAttention:
        return GPU_BACKENDS.resolve(self.settings.attention)(
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            context=config.max_position,
            device=self.device,
            dtype=self.placement.dtype,
            numerics=self.settings.numerics,
        )

    def captures(self, attention: GpuAttention) -> bool:
        return self.settings.graphs and attention.capturable and self.stream is not None

    def kv(
        self, plan: MemoryPlan, pages: int, model: GpuDecoder, network: DrafterNetwork | None
    ) -> GpuKV:
        slots = KVSlots(pages * PAGE_SIZE, max(MAX_VERIFIED, self.settings.max_running), TREE_ROWS)
        scratch, config = slots.verified + 1, model.own_config
        quantised = self.settings.quantises_kv
        cache = self.placement.cache(config, pages, scratch, config.layers, quantised=quantised)
        draft = None
        if network:
            hidden = network.config.hidden_size
            draft = DraftKV(
                self.placement.cache(
                    own_config(network), pages, scratch + slots.tree, network.kv_layers
                ),
                torch.zeros(pages, hidden, dtype=self.placement.dtype, device=self.device),
            )
        return GpuKV(plan, slots, cache, draft, self.stream)

    def state(self, model: GpuDecoder, kv: GpuKV, pages_per_sequence: int) -> DeviceState:
        batch, tokens = self.sizes.max_running, pages_per_sequence * PAGE_SIZE
        layout = UploadLayout(
            batch=batch,
            chunks=self.sizes.max_chunks,
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
            dtype=self.placement.dtype,
            device=self.device.type,
        )
        upload_U = torch.zeros(layout.size, dtype=torch.int32, device=self.device)
        rows = self.sizes.most_rows(self.settings.max_rows) + SCORED
        hidden_RH = self.placement.empty(rows, model.hidden_size)
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
            self.sizes.depth,
            kv.page_hint_PH,
            kv.adapters,
            self.agreement,
            SharedHead(self.agreement.peers)
            if self.agreement and len(model.head_WH) < model.vocab_size
            else None,
        )

    def passes(
        self,
        state: DeviceState,
        kv: GpuKV,
        drafter: Drafter | None,
        *,
        quiet: Callable[[], bool] = lambda: True,
        drain: Callable[[torch.cuda.Stream], None] = synchronize,
        readers: Sequence[RowReader] = (),
    ) -> Passes:
        attention = self.backend(state.model.own_config)
        storage = self._network_storage(drafter, kv)
        drafters: dict[str, GpuDrafter] = {
            name: load_object(DRAFTERS[name].gpu.implementation).make(state, storage)
            for name in self.settings.drafters
        }
        captures = self.captures(attention)
        return Passes(
            state,
            attention,
            drafters,
            GraphPool(self.stream if captures else None, quiet=quiet, drain=drain),
            shapes=self.sizes,
            stream=self.stream,
            readers=readers,
            run_first=self.settings.numerics != "strict",
        )

    def _network_storage(self, drafter: Drafter | None, kv: GpuKV) -> NetworkStorage | None:
        name = networked(self.settings.drafters)
        if name is None or drafter is None or kv.draft is None:
            return None
        attention, held = self.backend(own_config(drafter.network)), self.settings.records
        return NetworkStorage(name, drafter, kv.draft.cache, attention, kv.draft.page_hint_PH, held)

    def prepare(
        self,
        runner: StepRunner,
        kernels: KernelStart | None,
        networks: Iterable[object],
        keys: Keys,
        on_progress: OnProgress = lambda name, done, of: None,
        *,
        on_compiled: Callable[[], None] = lambda: None,
    ) -> None:
        """Load every kernel that a step or a push launches, and capture the steps of these keys.
        `on_compiled`: called before the capture.
        """
        if kernels is not None:
            prepare(runner, kernels, networks, keys, on_progress, on_compiled=on_compiled)
            return
        if self.stream is not None:
            load_exchange(networks)
        on_compiled()

    def synchronize(self) -> None:
        """Wait for our own streams only: others may run kernels that wait for a trainer."""
        if self.stream is not None:
            torch.cuda.default_stream(self.device).synchronize()
            self.stream.synchronize()


def own_config(network: DrafterNetwork) -> ModelConfig:
    """Return the shape of this rank's part of a drafter's layer; the whole layer if it is not
    sharded.
    """
    return network.part.layer if network.part else network.config


class Lent:
    """Everything that a sleep frees, and the graphs captured over it."""

    def __init__(self, passes: Passes, kv: GpuKV) -> None:
        state = passes.state
        self._graphs, self._states = passes.graphs, kv.states
        buffers = state.logits_SV, state.batch_slots.count_QV
        self._parts: list[KVCache | Backing] = [*kv.caches, *(Backing(each) for each in buffers)]
        if kv.states is not None:
            self._parts.append(Backing(kv.states.ring.state_CX))

    def free(self) -> None:
        if self._states is not None:
            self._states.settle()  # copies read the ring
        # Graphs hold addresses; keys are recorded again as they are used.
        self._graphs.clear()
        for part in self._parts:
            part.free()
        give_back()

    def reclaim(self) -> None:
        try:
            for part in self._parts:
                part.reclaim()
        except torch.OutOfMemoryError:
            self.free()
            raise
