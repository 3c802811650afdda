"""The CPU: float32, compiled kernels, and a runner that has finished when `launch` returns."""

from __future__ import annotations

import os
import platform
from copy import deepcopy
from dataclasses import replace
from functools import partial

import torch
from llvmlite.binding import get_host_cpu_name

from tlt_kernels import versions
from tlt_kernels.cpu.compiled import MODULES
from tlt_server.attention.rows import KVCache
from tlt_server.engine.cpu.link import CpuLink, check_numerics
from tlt_server.engine.cpu.orders import Install
from tlt_server.engine.cpu.runner import CpuRunner
from tlt_server.engine.devices import Equipment, Memory, RunnerSetup, compiled
from tlt_server.engine.devices.sizing import kv_pages, training_share
from tlt_server.engine.phases import OnProgress
from tlt_server.engine.ranks.orders import NO_RANKS, Allocate, FreePages, RankOrders
from tlt_server.engine.ranks.ranks import Ranks, reclaim_on
from tlt_server.engine.ranks.shared_models import key_of, share
from tlt_server.engine.record.hidden_states import CachedStates, describe_states
from tlt_server.engine.schedule.sequence import Sequence
from tlt_server.engine.settings import DecidedSettings
from tlt_server.models.adapted import AdapterSlots
from tlt_server.models.config import ModelConfig
from tlt_server.models.decoder import Decoder
from tlt_server.models.loader import load_target
from tlt_server.models.numerics import Numerics
from tlt_server.models.split import Split
from tlt_server.process.machine import host_memory
from tlt_server.registry import load_object
from tlt_server.samples.hidden_states import FLOAT32, state_bytes
from tlt_server.speculation.drafters import DRAFTERS, find_loader, networked
from tlt_server.speculation.drafters.cpu import CpuDrafter, DraftSetup, DraftWeights, Sleeper
from tlt_server.speculation.sizes import AnySize
from tlt_server.weights.parts import Changed, Drafter, Live, Target
from tlt_server.weights.storage import Free, disk_free
from tlt_server.wire.fingerprint import Fingerprint


class CpuDevice:
    name = "cpu"
    warms_up = True
    sizes = AnySize()
    recordings = None
    device = torch.device("cpu")

    def __init__(self, settings: DecidedSettings) -> None:
        threads = settings.rank_threads
        torch.set_num_threads(threads)
        self._settings = settings
        self._ranks: RankOrders = NO_RANKS
        self._numerics = Numerics(settings.numerics, threads=threads)

    @property
    def numerics(self) -> str:
        return self._numerics.describe()

    @property
    def fingerprint(self) -> Fingerprint:
        return of_cpu(self._settings, self._numerics)

    def compile(self, on_progress: OnProgress) -> str:
        return compiled(MODULES, on_progress)

    def load(self, config: ModelConfig) -> Live:
        settings, directory = self._settings, self._settings.drafter_directory
        loader = find_loader(directory, self.name) if directory else None
        split, ranks = Split(settings.reduction_leaves), None
        if settings.tensor_parallel > 1:
            ranks = self._ranks = Ranks(settings, CpuLink)
            split = share(ranks, Split(settings.reduction_leaves, 0, settings.tensor_parallel))
        target = load_target(
            settings.model,
            config=config,
            numerics=self._numerics,
            attention=settings.attention,
            page_size=settings.page_size,
            feature_layers=loader.feature_layers(directory, config) if loader and directory else (),
            split=split,
            random=settings.random_weights,
        )
        if ranks is not None:
            check_numerics(ranks, target)
        version = settings.weight_version
        live = Live(Target.loaded(version, target, settings.checkpoint))
        if loader is None or directory is None:
            return live
        how = settings.drafter_quantization
        network = loader.empty(directory, target, quantization=how)
        loader.fill(network, directory)
        calibration = loader.calibration(directory)
        return replace(live, drafter=Drafter.loaded(version, network, calibration, directory))

    def allocate(self, live: Live, max_model_len: int) -> Memory:
        assert isinstance(live.target.network, Decoder)
        settings, model = self._settings, live.target.network
        captures = settings.feature_ring is not None and model.feature_width > 0
        make = partial(
            model.make_cache,
            page_size=settings.page_size,
            hidden=captures,
            rounds=settings.quantises_kv,
        )
        bytes_per_page = make(1, scratch=0).bytes_per_kv_slot * settings.page_size
        pages = kv_pages(settings, bytes_per_page, max_model_len)
        cache = make(pages, scratch=settings.max_draft_rows)
        self._ranks.order(Allocate(key_of(model), 0, pages, max_model_len), wait=True)
        save, restore = self._ranks.copiers(cache.save, cache.restore)
        memory = Memory(pages, cache.reuse, save, restore, cache)
        if not captures or live.drafter is None:
            return memory
        share = training_share(settings, live.drafter.network)
        each = state_bytes(model.feature_width, model.hidden_size, FLOAT32)
        return replace(
            memory,
            states=CachedStates(cache),
            detail=describe_states(each, settings) + share.describe(self.name),
        )

    def equip(self, setup: RunnerSetup) -> Equipment:
        live, memory = setup.live, setup.memory
        assert isinstance(live.target.network, Decoder) and isinstance(memory.kv, KVCache)
        drafters = dict[str, CpuDrafter]()
        for name in self._settings.drafters:
            drafting = DraftSetup(
                name,
                memory.kv,
                _draft_weights(live),
                max_requests=self._settings.max_running,
                max_rows=self._settings.max_draft_rows,
            )
            drafters[name] = load_object(DRAFTERS[name].cpu.implementation).make(drafting)
        if self._settings.records and (own := networked(drafters)):
            drafters[own].tables[own].hold()
        runner = CpuRunner(
            live.target.network,
            memory.kv,
            drafters,
            setup.page_table_SP,
            self._adapter_slots(live),
            self._ranks,
        )
        caches = (memory.kv, *(cache for drafter in drafters.values() for cache in drafter.caches))
        return CpuEquipment(runner, tuple(drafters.values()), caches)

    def _adapter_slots(self, live: Live) -> AdapterSlots | None:
        settings, network = self._settings, live.target.network
        if not settings.max_loras:
            return None
        assert isinstance(network, Decoder)
        slots = AdapterSlots(
            network.config, settings.max_loras, settings.max_lora_rank, network.numerics
        )
        network.self_test(slots.samples())
        for adapter in live.adapters.values():
            slots.fill(adapter.slot, adapter.network)
        return slots

    def free(self) -> Free:
        available = host_memory().available
        return Free(available, available, disk_free(self._settings.state_dir))


class CpuEquipment(Equipment):
    """The runner, with everything that pushes change and sleeps free."""

    runner: CpuRunner

    def __init__(
        self, runner: CpuRunner, drafters: tuple[CpuDrafter, ...], caches: tuple[Sleeper, ...]
    ) -> None:
        self.runner, self.ranks, self.tables = runner, runner.ranks, runner.tables
        self._drafters, self._caches = drafters, caches

    def install(self, live: Live, changed: Changed) -> None:
        assert isinstance(live.target.network, Decoder)
        self.ranks.order(Install(key_of(live.target.network)), wait=True)
        self.runner.model = live.target.network
        if changed.adapter is not None:
            assert self.runner.adapters is not None
            adapter = live.adapters[changed.adapter.name]
            self.runner.adapters.fill(adapter.slot, adapter.network)
        weights = _draft_weights(live)
        for drafter in self._drafters:
            drafter.install(weights)

    def free(self) -> None:
        self.ranks.order(FreePages(), wait=True)
        self._free_own()

    def _free_own(self) -> None:
        for cache in self._caches:
            cache.free()

    def reclaim(self) -> None:
        for cache in self._caches:
            cache.reclaim()
        reclaim_on(self.ranks, self._free_own)

    def forget(self) -> None:
        for drafter in self._drafters:
            drafter.forget()

    def on_end(self, sequence: Sequence) -> None:
        if sequence.background:
            return  # its text is no response
        for drafter in self._drafters:
            drafter.finish(
                sequence.id,
                sequence.request.group_id,
                sequence.tokens,
                sequence.prompt_len,
                sequence.request.tenant,
            )


def _draft_weights(live: Live) -> DraftWeights | None:
    """Return the drafter's weights for the live target. Drafts correct a copy of the table."""
    if live.drafter is None:
        return None
    live.drafter.network.follow(live.target.network)
    return DraftWeights(live.drafter.network, deepcopy(live.drafter.calibration))


def of_cpu(settings: DecidedSettings, numerics: Numerics) -> Fingerprint:
    """Return the fingerprint after the self-test, which chooses the library. Kernels are compiled
    for a processor, whose vectors are the order in which their loops add.
    """
    processor = os.environ.get("NUMBA_CPU_NAME") or get_host_cpu_name()
    library = f"MKL_CBWR {os.environ.get('MKL_CBWR', 'unset')}"
    architecture = f"{platform.machine()} {processor}, {library}"
    how = f"{numerics.mode} {versions.CPU}: {numerics.method.name}"
    given = settings.reduction_leaves, settings.types, architecture, how, settings.attention
    return Fingerprint(*given, settings.quantization)
