"""Builds an engine from its settings: model, KV, drafters, policy, scheduler, in timed phases."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from tlt_server.attention.rows import KVCache
from tlt_server.engine.loop import Engine
from tlt_server.engine.pages import PagePool
from tlt_server.engine.pushes import WeightPushes
from tlt_server.engine.runner import CpuRunner
from tlt_server.engine.sampling import SamplingState, compile_kernels
from tlt_server.engine.scheduler import Scheduler
from tlt_server.engine.sequence import Sequence
from tlt_server.engine.settings import EngineSettings
from tlt_server.errors import InvalidRequest, StartupError
from tlt_server.models.config import ModelConfig
from tlt_server.models.decoder import Decoder
from tlt_server.models.eagle import Eagle3, feature_layers
from tlt_server.models.loader import load_target
from tlt_server.models.numerics import Numerics
from tlt_server.records import EngineInfo, GenerateRequest, Sampling, SetPolicy, Submit
from tlt_server.speculation.drafters import DRAFTERS, Drafter
from tlt_server.speculation.drafters.eagle import Eagle
from tlt_server.speculation.policies import POLICIES, Policy
from tlt_server.speculation.policies.arms import ladder
from tlt_server.speculation.policies.capped import Capped
from tlt_server.speculation.policies.fixed import Fixed
from tlt_server.speculation.survival import Calibration
from tlt_server.weights.parts import Drafter as DrafterPart
from tlt_server.weights.parts import Parts, Target
from tlt_server.weights.restore import Restored, restore
from tlt_server.weights.spool import Spool
from tlt_server.weights.transaction import Options, Transaction

OnPhase = Callable[[str, float, str], None]

MOST_POSITIONS = 1 << 22  # the rotary table of so many takes 4 GB at a head width of 128


def assemble(
    settings: EngineSettings,
    on_phase: OnPhase = lambda name, seconds, detail: None,
    on_begin: Callable[[list[str]], None] = lambda ids: None,
) -> tuple[Engine, EngineInfo]:
    """A ready engine and what it says of itself. `StartupError` names what cannot be used and the remedy.

    `on_begin`: see `Scheduler`.
    """
    phases: dict[str, float] = {}

    @contextmanager
    def phase(name: str) -> Iterator[list[str]]:
        started = time.perf_counter()
        detail: list[str] = []
        yield detail
        phases[name] = time.perf_counter() - started
        on_phase(name, phases[name], "".join(detail))

    torch.set_num_threads(settings.threads)
    numerics = Numerics(settings.numerics, threads=settings.threads)
    spool = Spool(Path(settings.state_dir), str(Path(settings.model).resolve())) if settings.state_dir else None
    with phase("load model") as detail:
        config = ModelConfig.read(Path(settings.model))
        max_model_len = served_length(settings, config)
        live, lost = Restored(_load(settings, replace(config, max_position=max_model_len), numerics), {})
        if spool:
            live, lost = restore(spool, live, Calibration.parse)
        assert live.target is not None
        model = live.target.network
        detail.append(settings.model)
    with phase("allocate KV") as detail:
        cache = _make_cache(settings, model, max_model_len)
        max_model_len = min(max_model_len, cache.pages * cache.page_size)
        detail.append(f"{cache.pages} pages of {cache.page_size} tokens, sequences of up to {max_model_len}")
    with phase("prepare drafters") as detail:
        drafters = _make_drafters(settings, live, cache)
        detail.append(", ".join(drafters) or "none")
    arms = ladder(drafters)

    def make_policy(command: SetPolicy) -> Policy:
        strategy = command.strategy or arms[-1]
        if strategy.drafter and strategy.drafter not in drafters:
            raise InvalidRequest(
                f"strategy {strategy.name!r} needs the drafter {strategy.drafter!r}; loaded: {', '.join(drafters) or 'none'}"
            )
        policy: Policy = POLICIES.resolve(command.policy)((strategy,) if command.policy == "fixed" else arms)
        return Capped(policy, settings.sd_max_batch) if settings.sd_max_batch else policy

    def make_sequence(request: GenerateRequest) -> Sequence:
        return Sequence(request, SamplingState(request, model.vocab_size, model.eos_token_ids), settings.page_size)

    def on_end(sequence: Sequence) -> None:
        request = sequence.request
        for drafter in drafters.values():
            drafter.finish(sequence.id, request.group_id, sequence.tokens, sequence.prompt_len, request.salt)

    scheduler = Scheduler(
        PagePool(cache.pages, cache.page_size, on_reuse=cache.reuse),
        max_running=settings.max_running,
        max_rows=settings.max_rows,
        max_pages_per_sequence=-(-max_model_len // settings.page_size),
        lookahead=max(arm.depth for arm in arms),
        weight_version=live.target.version,
        on_begin=on_begin,
        on_end=on_end,
        save=cache.save,
        restore=cache.restore,
    )
    runner = CpuRunner(model, cache, drafters, scheduler.page_table_SP)
    options = Options(Path(settings.weight_root) if settings.weight_root else None, settings.weight_marker, spool)
    pushes = WeightPushes(Transaction(live, options, Calibration.parse), scheduler, _installer(runner, drafters))
    policy = make_policy(SetPolicy(settings.policy, settings.strategy))
    engine = Engine(scheduler, runner, policy, make_policy, make_sequence, pushes)
    with phase("compile kernels"):
        compile_kernels()
        per_drafter = [arms[0], *(max((arm for arm in arms if arm.drafter == name), key=lambda arm: arm.rows) for name in drafters)]
        _warm_up(engine, [Fixed([arm]) for arm in per_drafter], model.vocab_size, max_model_len)
        engine.policy = policy
    info = EngineInfo(
        model=settings.served_model_name or Path(settings.model).resolve().name,
        weight_version=live.target.version,
        drafter_version=live.drafter.version if live.drafter else "",
        vocab_size=model.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=list(model.eos_token_ids),
        pages=cache.pages,
        page_size=cache.page_size,
        max_running=settings.max_running,
        drafter="+".join(drafters) or "none",
        policy=settings.policy,
        numerics=numerics.describe(),
        attention=settings.attention,
        dtype=str(model.embedding_VH.dtype).removeprefix("torch."),
        device=str(model.embedding_VH.device),
        threads=settings.threads,
        phases=phases,
        pid=os.getpid(),
        spooled=spool is not None,
        lost=lost,
    )
    return engine, info


def _eagle_directory(settings: EngineSettings) -> Path | None:
    return None if settings.drafter == "none" or settings.drafter in DRAFTERS else Path(settings.drafter)


def _load(settings: EngineSettings, config: ModelConfig, numerics: Numerics) -> Parts:
    """Target and, where a directory is named, EAGLE-3 drafter as they lie on disk."""
    eagle = _eagle_directory(settings)
    target = load_target(
        settings.model,
        config=config,
        numerics=numerics,
        attention=settings.attention,
        page_size=settings.page_size,
        feature_layers=feature_layers(eagle, config) if eagle else (),
    )
    parts = Parts(Target(settings.weight_version, target, {}))
    if eagle is None:
        return parts
    return Parts(parts.target, DrafterPart(settings.weight_version, Eagle3.load(eagle, target), Calibration.load(eagle), {}))


def _make_drafters(settings: EngineSettings, live: Parts, cache: KVCache) -> dict[str, Drafter]:
    """The drafter with weights, if there is one, and every drafter of the table that needs none."""
    drafters: dict[str, Drafter] = {}
    if live.drafter is not None:
        assert live.target is not None and isinstance(live.drafter.calibration, Calibration)
        live.drafter.network.follow(live.target.network)
        drafters["eagle"] = Eagle(
            live.drafter.network, cache, live.drafter.calibration, max_requests=settings.max_running, max_rows=settings.max_draft_rows
        )
    if settings.drafter != "none":
        drafters |= {name: DRAFTERS.resolve(name)() for name in DRAFTERS if name != "eagle"}
    return drafters


def _installer(runner: CpuRunner, drafters: dict[str, Drafter]) -> Callable[[Parts, Parts], None]:
    def install(live: Parts, changed: Parts) -> None:
        """Committed weights take over, between two steps."""
        assert live.target is not None
        runner.model = live.target.network
        eagle = drafters.get("eagle")
        if live.drafter is not None and isinstance(eagle, Eagle):
            live.drafter.network.follow(runner.model)
            if changed.drafter is not None:
                assert isinstance(live.drafter.calibration, Calibration)
                eagle.adopt(live.drafter.network, live.drafter.calibration)
            eagle.forget()  # its KV was made from features of the target before

    return install


def served_length(settings: EngineSettings, config: ModelConfig) -> int:
    """Positions of the longest sequence; `StartupError` when the model or this server has fewer than asked for."""
    if settings.max_model_len > config.max_position:
        raise StartupError(f"max_model_len {settings.max_model_len} exceeds the model's {config.max_position} positions; lower it")
    chosen = settings.max_model_len or config.max_position
    if chosen > MOST_POSITIONS:
        raise StartupError(f"max_model_len {chosen} is above the most this server takes, {MOST_POSITIONS}; set max_model_len lower")
    return chosen


def _make_cache(settings: EngineSettings, model: Decoder, max_model_len: int) -> KVCache:
    bytes_per_page = model.make_cache(1, settings.page_size, 0).bytes_per_slot * settings.page_size
    return model.make_cache(kv_pages(settings, bytes_per_page, max_model_len), settings.page_size, settings.max_draft_rows)


def kv_pages(settings: EngineSettings, bytes_per_page: int, max_model_len: int) -> int:
    """Pages as asked for, or as many as fit and could be in use at once; `StartupError` when they are too few or too many."""
    need = -(-max_model_len // settings.page_size)
    pages = settings.pages
    if not pages:
        pages = settings.kv_memory_mb * 2**20 // bytes_per_page
        if pages < need:
            raise StartupError(
                f"kv_memory_mb {settings.kv_memory_mb} holds {pages} pages, one sequence of max_model_len {max_model_len} needs {need}; "
                f"raise it to {-(-need * bytes_per_page // 2**20)} or lower max_model_len"
            )
        pages = min(pages, need * settings.max_running)  # more could never be in use at once
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if pages * bytes_per_page > installed:
        raise StartupError(
            f"{pages} pages of {settings.page_size} tokens take {pages * bytes_per_page // 2**20} MiB, this machine has "
            f"{installed // 2**20}; lower pages, page_size or kv_memory_mb"
        )
    return pages


def _warm_up(engine: Engine, policies: Iterable[Policy], vocab_size: int, max_model_len: int) -> None:
    """A short rollout under each policy, so that no request waits for a compiler."""
    length = max(1, min(8, max_model_len - 8))
    for i, policy in enumerate(policies):
        engine.policy = policy
        engine.send(
            Submit(
                [
                    GenerateRequest(
                        id=f"warm-{i}",
                        token_ids=[t % vocab_size for t in range(length)],
                        seed=0,
                        sampling=Sampling(max_tokens=6, ignore_eos=True),
                    )
                ]
            )
        )
        while not engine.idle:
            engine.step()
    engine.scheduler.pool.clear_index()
