"""A further rank of a GPU engine: its shard of the target, its drafter or shard of one, and the
passes of `passes.py`, which it launches as rank 0 tells it.

It reads nothing back from its GPU: rank 0 sees whether the ranks differ (`agreement.py`).
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tlt_kernels.gpu.upload import Upload
from tlt_server.engine.devices import DEVICES
from tlt_server.engine.devices.choice import gpu_split
from tlt_server.engine.gpu.memory.budget import MemoryPlan, Needs
from tlt_server.engine.gpu.memory.kv import GpuKV
from tlt_server.engine.gpu.passes import Passes
from tlt_server.engine.gpu.ranks.joining import RankGroup, join
from tlt_server.engine.gpu.ranks.orders import (
    Begin,
    DropKernels,
    Equip,
    FinishStep,
    ForgetTexts,
    GpuOrder,
    LaunchOrder,
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
from tlt_server.engine.gpu.ranks.window_sizes import window_sizes
from tlt_server.engine.gpu.start.kernel_start import KernelStart, engine_digest
from tlt_server.engine.gpu.start.maker import GpuMaker, Lent
from tlt_server.engine.gpu.start.preparing import KernelList, record
from tlt_server.engine.gpu.steps.agreement import Agreement
from tlt_server.engine.gpu.steps.drafts import DraftKey, DraftPass, GpuDrafter
from tlt_server.engine.gpu.steps.extend import Extend, ExtendKey
from tlt_server.engine.gpu.steps.reports import REHEARSED, REHEARSED_KEYS
from tlt_server.engine.gpu.steps.ring import PinnedRing
from tlt_server.engine.ranks.memory import RankMemory
from tlt_server.engine.ranks.orders import Allocate, Array, Install, RankStart
from tlt_server.models.config import ModelConfig
from tlt_server.models.gpu.decoder import GpuDecoder
from tlt_server.models.gpu.eagle import GpuEagleNetwork
from tlt_server.models.gpu.swapping import swap_networks
from tlt_server.models.loader import eos_token_ids
from tlt_server.speculation.drafters.loading import find_loader
from tlt_server.weights.parts import Drafter

UPLOADS = 8  # buffers of words that may be on their way


class GpuRank:
    orders = GpuOrder

    def __init__(self, start: RankStart, side: socket.socket) -> None:
        """Join the others. `side`: where the memory of models comes from."""
        settings = self._settings = start.decided
        kind = DEVICES.resolve(start.device)
        device = torch.device("cpu")
        if kind.name == "cuda":
            device = torch.device("cuda", start.rank)
            torch.cuda.set_device(device)
        config = replace(ModelConfig.read(Path(settings.model)), max_position=start.max_position)
        self._config = eos_token_ids(config, Path(settings.model))
        self._maker = GpuMaker(settings, device, kind.prompts)
        sizes = window_sizes(settings, config, self._maker.sizes)
        group = RankGroup(Path(start.directory), start.rank, start.ranks, device)
        self._joined = join(group, sizes, settings.exchange)  # keeps the memory mapped
        peers = self._joined.peers
        peers.mute()
        self._agreement = Agreement(peers)
        self._maker.share(peers, self._agreement)
        self._split = gpu_split(settings, config, start.rank)
        self._stream = self._maker.stream
        self._memory = RankMemory(side, self._make, self._maker.synchronize)
        self._live: dict[type, Any] = {}  # target and drafter in use: graphs know their storage
        self._kv: GpuKV | None = None
        self._passes: Passes | None = None
        self._uploads: PinnedRing | None = None
        self._masks: PinnedRing | None = None
        self._begun: tuple[Extend, DraftPass | None] | None = None  # a step that awaits masks
        self._kernels: KernelList  # for the policy under preparation

    @property
    def passes(self) -> Passes:
        assert self._passes is not None, "an order before the passes"
        return self._passes

    @property
    def kv(self) -> GpuKV:
        assert self._kv is not None, "an order before the pages"
        return self._kv

    @torch.inference_mode()
    def follow(self, order: Any) -> str:
        match order:
            case _ if isinstance(order, LaunchOrder):
                with torch.cuda.stream(self._stream):
                    self._launch(order)
            case Install(key):
                self._install(self._memory.models[key])
            case SwapModels(resident, other):
                self._swap(resident, other)
            case Settle():
                self._maker.synchronize()
            case ForgetTexts(slots):
                self.passes.forget(slots)
            case WriteTable() | RenewTable() | SetDrafterTable():
                self._follow_on_tables(order)
            case ReportMemory():
                return self._free()
            case Allocate():
                self._allocate(order)
            case Equip():
                self._equip(order)
            case Begin():
                self._agreement.begin()
            case _:
                self._memory.follow(order)
        return ""

    # -- steps -------------------------------------------------------------------------------------

    def _launch(self, order: LaunchOrder) -> None:
        match order:
            case UploadWords(word_U):
                self._send(word_U)
            case TakeOver():
                self.passes.take_over()
            case RunStep():
                self._run(order)
            case FinishStep(word_M, step):
                self._finish(word_M, step)
            case RecordStep(draft, extend):
                key = draft or extend
                assert key is not None
                record(self.passes, key)
            case ListKernels(passes, first):
                if first:
                    self._kernels = KernelList(self.passes)
                self._kernels.add(passes)
            case LoadKernels(count, last):
                self._kernels.load(count, last=last)
            case DropKernels():
                self._kernels.drop()

    def _send(self, word_U: Array) -> None:
        assert self._uploads is not None
        buffer = self._uploads.take()
        buffer.array[: len(word_U)] = word_U
        self.passes.send(buffer, len(word_U))

    def _run(self, step: RunStep) -> None:
        passes, extend = self.passes, self.passes.extend(step.extend)
        drafted = passes.run_draft(step.draft, capped=step.capped) if step.draft else None
        passes.select(extend, drafted)
        passes.run_extend(extend)
        if step.extend.structured:
            self._begun = extend, drafted
        else:
            self._end(step, extend, drafted)

    def _finish(self, word_M: Array, step: RunStep) -> None:
        assert self._begun is not None
        (extend, drafted), self._begun = self._begun, None
        masks = self.passes.state.masks.whole
        if self._masks is None:
            self._masks = PinnedRing(UPLOADS, len(masks), pinned=self.passes.pinned)
        buffer = self._masks.take()
        buffer.array[: len(word_M)] = word_M
        masks[: len(word_M)].copy_(buffer.tensor[: len(word_M)], non_blocking=True)
        buffer.mark()
        self.passes.run_second(extend)
        self._end(step, extend, drafted)

    def _end(self, step: RunStep, extend: Extend, drafted: DraftPass | None) -> None:
        if drafted is not None and step.learns:
            self.passes.learn(extend, drafted)
        extend.follow_reports(step.reported)

    # -- what is made at start ---------------------------------------------------------------------

    def _free(self) -> str:
        if self._stream is None:
            return f"{2**40} {2**40}"
        free, total = torch.cuda.mem_get_info()
        cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return f"{free + cached} {total}"

    def _allocate(self, order: Allocate) -> None:
        model, drafter = self._live[GpuDecoder], self._live.get(GpuEagleNetwork)
        part, width = drafter.part if drafter else None, model.feature_width
        needs = Needs.of(self._settings, model.own_config, drafter, 0, width, part)
        plan = MemoryPlan(self._settings, needs, order.max_model_len, 0, 0)
        self._kv = self._memory.pages = self._maker.kv(plan, order.pages, model, drafter)

    def _equip(self, order: Equip) -> None:
        model, network = self._live[GpuDecoder], self._live.get(GpuEagleNetwork)
        drafter, directory = None, self._settings.drafter_directory
        if network is not None and directory is not None:
            calibration = find_loader(directory, "cuda").calibration(directory)
            drafter = Drafter("", network, {}, calibration=calibration)
        state = self._maker.state(model, self.kv, order.pages_per_sequence)
        passes = self._passes = self._maker.passes(state, self.kv, drafter)
        self._uploads = PinnedRing(UPLOADS, state.layout.size, pinned=passes.pinned)
        self._memory.slept = Lent(passes, self.kv)
        self._maker.synchronize()
        kernels = None
        if passes.graphs.captures:
            kernels = KernelStart(engine_digest(self._settings, self._config))
        keys: list[DraftKey | ExtendKey] = [*order.drafts, *order.extends]
        self._maker.prepare(self, kernels, [*self._live.values()], keys)

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        assert self._uploads is not None
        with torch.cuda.stream(self._stream):
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

    # -- models ------------------------------------------------------------------------------------

    def _make(self, target: GpuDecoder | None) -> GpuDecoder | GpuEagleNetwork:
        """Make a target, or a drafter next to one."""
        return self._target() if target is None else self._drafter(target)

    def _target(self) -> GpuDecoder:
        directory, layers = self._settings.drafter_directory, tuple[int, ...]()
        if directory is not None:
            layers = find_loader(directory, "cuda").feature_layers(directory, self._config)
        return GpuDecoder(
            self._config, placement=self._maker.placement, feature_layers=layers, split=self._split
        )

    def _drafter(self, target: GpuDecoder) -> GpuEagleNetwork:
        directory = self._settings.drafter_directory
        assert directory is not None
        made: GpuEagleNetwork = find_loader(directory, "cuda").empty(directory, target)
        return made

    def _install(self, model: GpuDecoder | GpuEagleNetwork) -> None:
        if isinstance(model, GpuDecoder):
            self._live[GpuDecoder] = model
            return
        model.follow(self._live[GpuDecoder])
        self._live[GpuEagleNetwork] = model

    def _swap(self, resident: int, other: int) -> None:
        """Exchange the values of two models. Keys go on naming storage."""
        models = self._memory.models
        self._maker.synchronize()
        with torch.cuda.stream(self._stream):
            swap_networks(models[resident], models[other])
        self._maker.synchronize()
        models[resident], models[other] = models[other], models[resident]
        new = models[resident]
        if isinstance(new, GpuDecoder):
            self._live[GpuDecoder] = self.passes.state.model = new
            return
        self._live[GpuEagleNetwork] = new
        for drafts in self._with_network:
            drafts.network = new

    @property
    def _with_network(self) -> list[GpuDrafter]:
        return [each for each in self.passes.drafters.values() if each.network is not None]

    # -- tables ------------------------------------------------------------------------------------

    def _follow_on_tables(self, order: WriteTable | RenewTable | SetDrafterTable) -> None:
        if isinstance(order, SetDrafterTable):
            floats = (values.view(np.float32) for values in (order.edge_G, order.survival_K))
            with torch.cuda.stream(self._stream):
                for drafts in self._with_network:
                    drafts.begin_again(*floats)
            return
        [table] = [
            drafts.tables(self._stream)[order.table]
            for drafts in self.passes.drafters.values()
            if order.table in drafts.tables(self._stream)
        ]
        if isinstance(order, WriteTable):
            table.write(order.survival_K.view(np.float32), order.hits_K, order.trials_K)
        else:
            table.renew()
