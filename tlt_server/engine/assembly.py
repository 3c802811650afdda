"""Builds an engine from its settings: model, KV, drafters, policy, scheduler, in timed phases."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from tlt_server.attention.rows import KVCache
from tlt_server.engine.loop import Engine
from tlt_server.engine.pages import PagePool
from tlt_server.engine.runner import CpuRunner
from tlt_server.engine.sampling import SamplingState
from tlt_server.engine.scheduler import Scheduler
from tlt_server.engine.sequence import Sequence
from tlt_server.engine.settings import EngineSettings
from tlt_server.errors import InvalidRequest, StartupError
from tlt_server.models import Target
from tlt_server.models.eagle import Eagle3
from tlt_server.models.loader import load_target
from tlt_server.models.numerics import Numerics
from tlt_server.records import OFF, EngineInfo, GenerateRequest, SetPolicy, Strategy
from tlt_server.speculation.drafters import DRAFTERS, Drafter
from tlt_server.speculation.policies import POLICIES, Policy
from tlt_server.speculation.policies.arms import ladder

OnPhase = Callable[[str, float, str], None]


def assemble(settings: EngineSettings, on_phase: OnPhase = lambda name, seconds, detail: None) -> tuple[Engine, EngineInfo]:
    """A ready engine and what it says of itself. `StartupError` names what cannot be used and the remedy."""
    phases: dict[str, float] = {}

    @contextmanager
    def phase(name: str) -> Iterator[list[str]]:
        started, detail = time.perf_counter(), []
        yield detail
        phases[name] = time.perf_counter() - started
        on_phase(name, phases[name], "".join(detail))

    torch.set_num_threads(settings.threads)
    eagle_directory = settings.drafter if settings.drafter not in ("history", "none") else None
    with phase("load model") as detail:
        numerics = Numerics(settings.numerics)
        model = load_target(settings.model, dtype=settings.dtype, numerics=numerics, attention=settings.attention,
                            page_size=settings.page_size, eagle=eagle_directory)
        detail.append(settings.model)
    with phase("allocate KV") as detail:
        max_model_len = _max_model_len(settings, model)
        cache = _make_cache(settings, model, max_model_len)
        detail.append(f"{cache.pages} pages of {settings.page_size} tokens")
    with phase("load drafter") as detail:
        drafters = _make_drafters(settings, model, cache, eagle_directory)
        detail.append(", ".join(drafters) or "none")

    def make_policy(command: SetPolicy) -> Policy:
        arms = [arm for name in drafters for arm in ladder(name)]
        if command.policy == "fixed":
            chosen = command.strategy or (arms[0] if arms else OFF)
            if chosen.drafter and chosen.drafter not in drafters:
                raise InvalidRequest(f"strategy {chosen.name!r} needs the drafter {chosen.drafter!r}; loaded are {', '.join(drafters) or 'none'}")
            arms = [chosen]
        return POLICIES.resolve(command.policy)([OFF, *arms], settings.policy_settings(command.policy))

    def make_sequence(request: GenerateRequest) -> Sequence:
        return Sequence(request, SamplingState(request, model.vocab_size, model.eos_token_ids), settings.weight_version, settings.page_size)

    with phase("warm up"):
        policy = make_policy(SetPolicy(settings.policy, settings.strategy))
        pool = PagePool(cache.pages, cache.page_size, on_reuse=lambda pages: [drafter.pages_reused(pages) for drafter in drafters.values()])
        scheduler = Scheduler(pool, max_running=settings.max_running, max_rows=settings.max_rows,
                              max_pages_per_sequence=-(-max_model_len // settings.page_size), lookahead=16, weight_version=settings.weight_version)
        runner = CpuRunner(model, cache, drafters, scheduler.page_table_SP)
        engine = Engine(scheduler, runner, policy, make_policy, make_sequence)
    info = EngineInfo()
    return engine, info
