"""A GPU's half of a worker rank: its shard of the target, its drafter or shard of one, and the
passes of `passes.py`, which it launches on rank 0's orders.

It reads nothing back from its GPU: rank 0 detects whether the ranks differ (`agreement.py`).
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tlt_kernels.gpu.upload import Upload
from tlt_server.engine.devices import DEVICES
from tlt_server.engine.devices.choice import gpu_split
from tlt_server.engine.exchange.joining import RankGroup, join
from tlt_server.engine.gpu.memory.budget import MemoryPlan, Needs
from tlt_server.engine.gpu.memory.kv import GpuKV
from tlt_server.engine.gpu.orders import (
    Begin,
    DropKernels,
    Equip,
    FinishStep,
    ForgetTexts,
    ListKernels,
    LoadKernels,
    RecordStep,
    RenewTable,
    ReportMemory,
    RunStep,
    SetDrafterTable,
    Settle,
    SwapModels,
    TakeOver,
    UploadWords,
    WriteTable,
)
from tlt_server.engine.gpu.passes import Passes
from tlt_server.engine.gpu.start.kernel_start import KernelStart, engine_digest
from tlt_server.engine.gpu.start.maker import GpuMaker, Lent
from tlt_server.engine.gpu.start.planning import window_sizes
from tlt_server.engine.gpu.start.preparing import KernelList, record
from tlt_server.engine.gpu.steps.agreement import Agreement
from tlt_server.engine.gpu.steps.drafts import DraftKey, DraftPass, GpuDrafter
from tlt_server.engine.gpu.steps.drafts.tables import DeviceTable
from tlt_server.engine.gpu.steps.extend import Extend, ExtendKey, StructuredExtend
from tlt_server.engine.gpu.steps.reports import REHEARSED, REHEARSED_KEYS
from tlt_server.engine.gpu.steps.ring import PinnedRing
from tlt_server.engine.ranks.memory import Handlers, RankMemory
from tlt_server.engine.ranks.orders import Allocate, RankOrder, RankStart
from tlt_server.models.config import ModelConfig
from tlt_server.models.gpu.decoder import GpuDecoder
from tlt_server.models.gpu.eagle import GpuEagleNetwork
from tlt_server.models.gpu.swapping import swap_networks
from tlt_server.models.loader import eos_token_ids
from tlt_server.speculation.drafters import find_loader
from tlt_server.weights.parts import Drafter

UPLOADS = 8  # buffers of words that may be on their way


class GpuRank:
    def __init__(self, start: RankStart, side: socket.socket) -> None:
        """Join the other ranks. `side`: the socket that brings the memory of models."""
        settings = self._settings = start.decided
        kind = DEVICES.resolve(start.device)
        device = torch.device("cpu")
        if kind.name == "cuda":
            device = torch.device("cuda", start.rank)
            torch.cuda.set_device(device)
        config = ModelConfig.served(settings)
        self._config = eos_token_ids(config, Path(settings.model))
        maker = GpuMaker.of(settings, device, kind.prompts)
        sizes = window_sizes(settings, config, maker.sizes)
        group = RankGroup(Path(start.directory), start.rank, start.ranks, device)
        self._joined = join(group, sizes, settings.exchange)  # keeps the memory mapped
        peers = self._joined.peers
        peers.mute()
        self._agreement = Agreement(peers)
        self._maker = maker.shared(self._agreement)
        self._split = gpu_split(settings, config, start.rank)
        self._memory = RankMemory(side, self._make, self._maker.synchronize)
        self.handlers: Handlers = {
            **self._memory.handlers,
            ReportMemory: self._report_memory,
            Allocate: self._allocate,
            UploadWords: lambda order: None,  # rank 0 rehearses before the others have passes
            Settle: lambda order: self._maker.synchronize(),
            Begin: lambda order: self._agreement.begin(),
        }

    def _make(self, target: GpuDecoder | None) -> GpuDecoder | GpuEagleNetwork:
        """Create a target, or a drafter for one."""
        directory, layers = self._settings.drafter_directory, tuple[int, ...]()
        if directory is not None:
            loader = find_loader(directory, "cuda")
            if target is not None:
                how = self._settings.drafter_quantization
                drafter: GpuEagleNetwork = loader.empty(directory, target, quantization=how)
                return drafter
            layers = loader.feature_layers(directory, self._config)
        return GpuDecoder(
            self._config, placement=self._maker.placement, feature_layers=layers, split=self._split
        )

    def _report_memory(self, order: ReportMemory) -> str:
        if self._maker.stream is None:
            return f"{2**40} {2**40}"
        free, total = torch.cuda.mem_get_info()
        cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return f"{free + cached} {total}"

    def _allocate(self, order: Allocate) -> None:
        models = self._memory.models
        model: GpuDecoder = models[order.target]
        network: GpuEagleNetwork | None = models[order.drafter] if order.drafter else None
        if network is not None:
            network.follow(model)
        part, width = network.part if network else None, model.feature_width
        needs = Needs.of(self._settings, model.own_config, network, 0, width, part)
        plan = MemoryPlan(self._settings, needs, order.max_model_len, 0, 0)
        kv = self._maker.kv(plan, order.pages, model, network)
        self.handlers[Equip] = partial(self._equip, model, network, kv)

    def _equip(
        self, model: GpuDecoder, network: GpuEagleNetwork | None, kv: GpuKV, order: Equip
    ) -> None:
        drafter, directory = None, self._settings.drafter_directory
        if network is not None and directory is not None:
            calibration = find_loader(directory, "cuda").calibration(directory)
            drafter = Drafter("", network, {}, calibration=calibration)
        state = self._maker.state(model, kv, order.pages_per_sequence)
        passes = self._maker.passes(state, kv, drafter)
        steps = GpuSteps(passes, self._memory.models, self._maker.synchronize)
        self._maker.synchronize()
        kernels = None
        if passes.graphs.captures:
            kernels = KernelStart(engine_digest(self._settings, self._config))
        keys: list[DraftKey | ExtendKey] = [*order.drafts, *order.extends]
        networks = [each for each in (model, network) if each is not None]
        self._maker.prepare(steps, kernels, networks, keys)
        self.handlers |= steps.handlers | self._memory.handlers_of(kv, Lent(passes, kv))


class GpuSteps:
    """The steps of a rank, and all changes between them."""

    def __init__(
        self, passes: Passes, models: dict[int, Any], synchronize: Callable[[], None]
    ) -> None:
        """`models`: by the keys of their storage in rank 0's orders."""
        self.passes, self._models, self._synchronize = passes, models, synchronize
        self._uploads = PinnedRing(UPLOADS, passes.state.layout.size, pinned=passes.pinned)
        self._unfinished: deque[tuple[StructuredExtend, DraftPass | None]] = (
            deque()
        )  # steps without masks
        self._kernels = KernelList(passes)  # for the policy under preparation
        launched: Handlers = {
            UploadWords: self._send,
            TakeOver: lambda order: passes.take_over(),
            RunStep: self._run,
            FinishStep: self._finish,
            RecordStep: self._record,
            ListKernels: self._list,
            LoadKernels: lambda order: self._kernels.load(order.count, last=order.last),
            DropKernels: lambda order: self._kernels.drop(),
            SetDrafterTable: self._set_drafter_table,
        }
        self.handlers: Handlers = {
            **{kind: partial(self._launch, handler) for kind, handler in launched.items()},
            ForgetTexts: lambda order: passes.forget(order.slots),
            WriteTable: self._write_table,
            RenewTable: self._renew_table,
            SwapModels: self._swap,
        }

    def _launch(self, handler: Callable[[Any], str | None], order: RankOrder) -> str | None:
        with torch.cuda.stream(self.passes.stream):
            return handler(order)

    def _send(self, order: UploadWords) -> None:
        buffer = self._uploads.take()
        buffer.array[: len(order.word_U)] = order.word_U
        self.passes.send(buffer, len(order.word_U))

    def _run(self, step: RunStep) -> None:
        passes, extend = self.passes, self.passes.extend(step.extend)
        drafted = passes.run_draft(step.draft, capped=step.capped) if step.draft else None
        passes.select(extend, drafted)
        passes.run_extend(extend)
        if isinstance(extend, StructuredExtend):
            self._unfinished.append((extend, drafted))
        else:
            self._end(step, extend, drafted)

    @cached_property
    def _masks(self) -> PinnedRing:
        return PinnedRing(UPLOADS, len(self.passes.state.masks.whole), pinned=self.passes.pinned)

    def _finish(self, order: FinishStep) -> None:
        extend, drafted = self._unfinished.popleft()
        buffer, size = self._masks.take(), len(order.word_M)
        buffer.array[:size] = order.word_M
        masks = self.passes.state.masks.whole
        masks[:size].copy_(buffer.tensor[:size], non_blocking=True)
        buffer.mark()
        self.passes.run_second(extend)
        self._end(order.step, extend, drafted)

    def _end(self, step: RunStep, extend: Extend, drafted: DraftPass | None) -> None:
        if drafted is not None and step.learns:
            self.passes.learn(extend, drafted)
        extend.follow_reports(step.reported)

    # -- graphs and kernels ------------------------------------------------------------------------

    def _record(self, order: RecordStep) -> None:
        for key in (order.draft, order.extend):
            if key is not None:
                record(self.passes, key)

    def _list(self, order: ListKernels) -> None:
        if order.first:
            self._kernels = KernelList(self.passes)
        self._kernels.add(order.passes)

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        with torch.cuda.stream(self.passes.stream):
            buffer = self._uploads.take()
            upload = Upload(self.passes.state.layout, buffer.array)
            upload.begin()
            upload.batch([], [])
            self.passes.send(buffer, upload.used)
            yield

    def rehearse(self) -> None:
        self.passes.forget([])
        for key in REHEARSED_KEYS:
            self.passes.extend(key).follow_reports(REHEARSED)

    # -- models and tables -------------------------------------------------------------------------

    def _swap(self, order: SwapModels) -> None:
        """Swap the values of two models. Keys keep naming the storage."""
        models, resident, other = self._models, order.resident, order.other
        self._synchronize()
        with torch.cuda.stream(self.passes.stream):
            swap_networks(models[resident], models[other])
        self._synchronize()
        models[resident], models[other] = models[other], models[resident]
        new = models[resident]
        if isinstance(new, GpuDecoder):
            self.passes.state.model = new
        else:
            for drafts in self._with_network:
                drafts.network = new

    @property
    def _with_network(self) -> list[GpuDrafter]:
        return [each for each in self.passes.drafters.values() if each.network is not None]

    def _set_drafter_table(self, order: SetDrafterTable) -> None:
        for drafts in self._with_network:
            drafts.begin_again(order.edge_G.view(np.float32), order.acceptance_K.view(np.float32))

    def _write_table(self, order: WriteTable) -> None:
        acceptance_K = order.acceptance_K.view(np.float32)
        self._table(order.table).write(acceptance_K, order.hits_K, order.trials_K)

    def _renew_table(self, order: RenewTable) -> None:
        self._table(order.table).renew()

    def _table(self, name: str) -> DeviceTable:
        [found] = [
            tables[name]
            for drafts in self.passes.drafters.values()
            if name in (tables := drafts.tables(self.passes.stream))
        ]
        return found
