"""The CPU: float32, compiled kernels, a runner that is done when `launch` returns."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from tlt_server.attention.rows import KVCache
from tlt_server.engine.devices import Equipped, Memory, OnProgress, Quiet
from tlt_server.engine.runner import CpuRunner
from tlt_server.engine.sampling import compile_kernels
from tlt_server.engine.sequence import Sequence
from tlt_server.engine.settings import DecidedSettings
from tlt_server.engine.sizing import kv_pages
from tlt_server.models.config import ModelConfig
from tlt_server.models.decoder import Decoder
from tlt_server.models.eagle import Eagle3, feature_layers
from tlt_server.models.loader import load_target
from tlt_server.models.numerics import Numerics
from tlt_server.registry import load_object
from tlt_server.speculation.drafters import DRAFTERS
from tlt_server.speculation.drafters.cpu import CpuDrafter, DraftSetup, DraftWeights, Sleeper
from tlt_server.speculation.policies.arms import Ladder
from tlt_server.speculation.survival import Calibration
from tlt_server.weights.parts import Changed, Drafter, Live, Target
from tlt_server.weights.storage import Free, disk_free, host_memory


class CpuDevice:
    name = "cpu"
    warms_up = True
    device = torch.device("cpu")

    def __init__(self, settings: DecidedSettings) -> None:
        torch.set_num_threads(settings.threads)
        self._settings = settings
        self._numerics = Numerics(settings.numerics, threads=settings.threads)
        self._cache: KVCache | None = None
        self._runner: CpuRunner | None = None
        self._drafters: dict[str, CpuDrafter] = {}

    @property
    def numerics(self) -> str:
        return self._numerics.describe()

    def load(self, config: ModelConfig) -> Live:
        settings = self._settings
        eagle = settings.drafter_directory
        target = load_target(
            settings.model,
            config=config,
            numerics=self._numerics,
            attention=settings.attention,
            page_size=settings.page_size,
            feature_layers=feature_layers(eagle, config) if eagle else (),
        )
        live = Live(Target(settings.weight_version, target, {}))
        if eagle is None:
            return live
        return Live(
            live.target,
            Drafter(
                settings.weight_version, Eagle3.load(eagle, target), Calibration.load(eagle), {}
            ),
        )

    def allocate(self, live: Live, max_model_len: int) -> Memory:
        assert isinstance(live.target.network, Decoder)
        settings, model = self._settings, live.target.network
        bytes_per_page = (
            model.make_cache(1, settings.page_size, 0).bytes_per_kv_slot * settings.page_size
        )
        pages = kv_pages(settings, bytes_per_page, max_model_len)
        self._cache = cache = model.make_cache(pages, settings.page_size, settings.max_draft_rows)
        return Memory(pages, cache.reuse, cache.save, cache.restore, self._free, self._reclaim)

    def _free(self) -> None:
        for cache in self._caches():
            cache.free()

    def _reclaim(self) -> None:
        for cache in self._caches():
            cache.reclaim()

    def _caches(self) -> list[Sleeper]:
        assert self._cache is not None
        caches: list[Sleeper] = [self._cache]
        for drafter in self._drafters.values():
            caches += drafter.caches
        return caches

    def equip(
        self,
        live: Live,
        ladder: Ladder,
        page_table_SP: NDArray[np.int32],
        on_progress: OnProgress,
        quiet: Quiet,
    ) -> Equipped:
        assert isinstance(live.target.network, Decoder) and self._cache is not None
        compile_kernels()
        setup = DraftSetup(
            self._cache,
            _draft_weights(live),
            max_requests=self._settings.max_running,
            max_rows=self._settings.max_draft_rows,
        )
        for name in ladder.drafters:
            self._drafters[name] = load_object(DRAFTERS[name].cpu.implementation).make(setup)
        self._runner = CpuRunner(live.target.network, self._cache, self._drafters, page_table_SP)
        return Equipped(self._runner, self._on_end)

    def free(self) -> Free:
        available = host_memory().available
        return Free(available, available, disk_free(self._settings.state_dir))

    def install(self, live: Live, changed: Changed) -> None:
        assert isinstance(live.target.network, Decoder) and self._runner is not None
        self._runner.model = live.target.network
        weights = _draft_weights(live)
        for drafter in self._drafters.values():
            drafter.install(weights)

    def _on_end(self, sequence: Sequence) -> None:
        for drafter in self._drafters.values():
            drafter.finish(
                sequence.id,
                sequence.request.group_id,
                sequence.tokens,
                sequence.prompt_len,
                sequence.request.salt,
            )


def _draft_weights(live: Live) -> DraftWeights | None:
    """Return the drafter's weights, reading the embedding of the target that is live."""
    if live.drafter is None:
        return None
    assert isinstance(live.target.network, Decoder)
    assert isinstance(live.drafter.network, Eagle3)
    live.drafter.network.follow(live.target.network)
    return DraftWeights(live.drafter.network, live.drafter.calibration)
