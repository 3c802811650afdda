"""Builds an engine from its settings in timed phases. The device makes model, KV and runner."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from tlt_client.channels import Intake
from tlt_client.channels.groups import Groups
from tlt_client.channels.line import made_directory
from tlt_server.engine.choosing import StrategyChoice
from tlt_server.engine.devices import Device, Equipment, Memory, RunnerSetup, make_device
from tlt_server.engine.devices.choice import DeviceChoice, Gpu, ModelFiles, choose, look
from tlt_server.engine.gate import StepGate
from tlt_server.engine.halt import Halt
from tlt_server.engine.knowledge_file import KnowledgeFile, code
from tlt_server.engine.loop import Engine, settle
from tlt_server.engine.phases import OnPhase, OnProgress, Phases
from tlt_server.engine.policy_changes import PolicyChanges
from tlt_server.engine.pushes.pushes import WeightPushes
from tlt_server.engine.record.traces import recorder_of
from tlt_server.engine.sampling.sampler import SamplingState
from tlt_server.engine.sampling.structures import Structures
from tlt_server.engine.schedule.pages import PagePool
from tlt_server.engine.schedule.running import RunningSet
from tlt_server.engine.schedule.scheduler import Scheduler
from tlt_server.engine.schedule.sequence import Sequence
from tlt_server.engine.settings import DecidedSettings, EngineSettings
from tlt_server.engine.start.checkpoints import check_checkpoints
from tlt_server.engine.start.profiling import StepProfile, nothing_learnt, warm_up
from tlt_server.errors import InvalidRequest
from tlt_server.models.config import ModelConfig
from tlt_server.process.machine import processor
from tlt_server.samples.activity import ActivityReader
from tlt_server.speculation.drafters import find_loader
from tlt_server.speculation.guard import AcceptanceGuard
from tlt_server.speculation.knowledge import Knowledge, WeightsInUse
from tlt_server.speculation.policies import POLICIES, Policy, Setup
from tlt_server.speculation.policies.arms import ladder
from tlt_server.speculation.policies.pinned import Pinned, limit
from tlt_server.speculation.switches import SwitchLog
from tlt_server.weights.dormant import Dormant
from tlt_server.weights.parts import Changed, Live
from tlt_server.weights.restore import Restored, restore
from tlt_server.weights.spool import Spool
from tlt_server.weights.storage import Options, Storage
from tlt_server.weights.transaction import Transaction
from tlt_server.wire.commands import SetPolicy
from tlt_server.wire.events import CHECKED, EngineInfo
from tlt_server.wire.fingerprint import libraries
from tlt_server.wire.records import Arms, GenerateRequest, Strategy

KEPT_POLICIES = 8  # policies whose memory is kept while others are active
PROFILE_S = 2.0  # time for the steps that are measured at start


class Policies(NamedTuple):
    """The active policy at start, the factory of other policies, and their shared knowledge of
    steps.
    """

    knowledge: Knowledge
    first: Policy
    make: Callable[[SetPolicy], Policy]


def assemble(
    settings: EngineSettings,
    on_phase: OnPhase = lambda name, seconds, detail: None,
    on_start: Callable[[list[str]], None] = lambda ids: None,
    on_progress: OnProgress = lambda name, done, of: None,
    make_device: Callable[[DecidedSettings], Device] = make_device,
) -> tuple[Engine, EngineInfo]:
    """Return a ready engine and its description. `StartupError` names the unusable setting or file
    and the remedy.

    `on_start`: see `Scheduler`. `on_progress`: called with a phase's name and (0, 0) when the phase
    begins, and with (done, total) during parts that have steps.
    """
    phase = Phases(on_phase, on_progress)
    with phase("choose device") as detail:
        gpu = look() if settings.device in (None, "cuda") else Gpu()
        choice = choose(settings, gpu, ModelFiles(Path(settings.model)))
        settings = choice.settings
        device = make_device(settings)
        detail.append(choice.describe())
    with phase(CHECKED):
        check_checkpoints(settings)
    with phase("load kernels") as detail:
        detail.append(device.compile(on_progress))
    options = _options(settings, device)
    with phase("load model") as detail:
        config = ModelConfig.served(settings)
        live, lost = Restored(device.load(config), {})
        if options.spool:
            live, lost = restore(options.spool, live, options)
        detail.append(str(settings.model) + ", FP8 drafter" * (live.drafter_quantization == "fp8"))
    with phase("allocate KV") as detail:
        memory = device.allocate(live, config.max_position)
        max_model_len = min(config.max_position, memory.pages * settings.page_size)
        detail.append(
            f"{memory.pages} pages of {settings.page_size} tokens, sequences of up to "
            f"{max_model_len}{memory.detail}"
        )
    policies = _policies(settings, device)
    running = RunningSet(
        PagePool(memory.pages, settings.page_size, on_reuse=memory.on_reuse),
        max_running=settings.max_running,
        max_pages_per_sequence=-(-max_model_len // settings.page_size),
    )
    with phase("prepare runner") as detail:
        quiet = partial(_quiet, options)
        reach, table = policies.first.strategies, running.page_table_SP
        equipment = device.equip(RunnerSetup(live, memory, reach, table, on_progress, quiet))
        detail.append(_equipped(settings, equipment))
    knowledge_file = KnowledgeFile(_state(settings), _made_by(settings, gpu, device, live))
    engine = _connect(
        settings, live, policies, running, memory, equipment, options, on_start, knowledge_file
    )
    _first_steps(engine, settings, device, max_model_len, live.target.network.vocab_size, phase)
    equipment.ranks.ready()
    info = msgspec.structs.replace(
        _describe(choice, gpu, device, live, memory, equipment, max_model_len, phase.seconds, lost),
        prepared=equipment.prepared(policies.first.strategies),
    )
    return engine, info


def _state(settings: EngineSettings) -> Path | None:
    return Path(settings.state_dir) if settings.state_dir else None


def _quiet(options: Options) -> bool:
    return not options.intake.groups.hold_gpu


def _equipped(settings: DecidedSettings, equipment: Equipment) -> str:
    matmuls = f"matmuls {equipment.matmuls}" if equipment.matmuls else ""
    drafters = f"drafters: {', '.join(settings.drafters) or 'none'}"
    return "; ".join(part for part in (drafters, matmuls, equipment.detail) if part)


def _first_steps(
    engine: Engine,
    settings: DecidedSettings,
    device: Device,
    max_model_len: int,
    vocab_size: int,
    phase: Phases,
) -> None:
    """Warm up and measure steps, unless a file has their times."""
    with phase("warm up"):
        if device.warms_up:
            with nothing_learnt(engine):
                arms = ladder(settings.drafters, settings.device).arms
                warm_up(engine, arms, vocab_size, max_model_len)
    with phase("measure steps") as detail:
        choice = engine.choice
        if known := choice.knowledge_file.load(choice.knowledge):
            detail.append(f"known from {known}")
        elif device.warms_up:
            profile = StepProfile(engine, vocab_size, max_model_len, PROFILE_S)
            while choice.policy.measures and profile.advance():
                pass
            engine.measure = None if choice.policy.measures else profile.advance
            detail.append(f"{len(profile.measured)} steps")


def _connect(
    settings: DecidedSettings,
    live: Live,
    policies: Policies,
    running: RunningSet,
    memory: Memory,
    equipment: Equipment,
    options: Options,
    on_start: Callable[[list[str]], None],
    knowledge_file: KnowledgeFile,
) -> Engine:
    """Create scheduler, pushes and pauses around the runner."""
    vocab_size, eos_token_ids = live.target.network.vocab_size, live.target.network.eos_token_ids
    recorder = recorder_of(settings, live.drafter_key, memory.states, equipment.tables)
    structures = Structures(Path(settings.model), vocab_size, eos_token_ids)

    def make_sequence(request: GenerateRequest) -> Sequence:
        return Sequence(
            request,
            SamplingState(request, vocab_size, eos_token_ids, structures),
            settings.page_size,
            recorder.trace(request) if recorder else None,
            pushes.unloads.adapter(request.lora),
        )

    def install(live: Live, changed: Changed) -> None:
        choice.renew(_in_use(live), partial(equipment.install, live, changed))
        if recorder:
            recorder.installed(live.drafter_key)

    gate = StepGate()
    scheduler = Scheduler(
        gate,
        running,
        max_rows=settings.max_rows,
        lookahead=settings.deepest,
        weight_version=live.target.version,
        prompt_budget=equipment.room,
        on_start=on_start,
        on_end=equipment.on_end,
        save=memory.save,
        restore=memory.restore,
    )
    knowledge = policies.knowledge
    knowledge.weights, knowledge.tables = _in_use(live), equipment.tables
    in_flight = partial(settle, scheduler, equipment.runner)
    transaction, confirm = Transaction(live, options), equipment.ranks.confirm
    pushes = WeightPushes(
        gate, transaction, scheduler, install, in_flight, confirm, knowledge.costs
    )
    choice = _choice(
        settings, policies, equipment, scheduler, lambda: not pushes.busy, knowledge_file
    )
    halt = Halt(gate, scheduler, equipment, pushes, Dormant(_state(settings)), in_flight)
    return Engine(scheduler, equipment, choice, pushes, halt, make_sequence, recorder, structures)


def _choice(
    settings: DecidedSettings,
    policies: Policies,
    equipment: Equipment,
    scheduler: Scheduler,
    no_push: Callable[[], bool],
    knowledge_file: KnowledgeFile,
) -> StrategyChoice:
    activity = ActivityReader(settings.activity) if settings.activity else None
    return StrategyChoice(
        policies.first,
        policies.knowledge,
        knowledge_file,
        AcceptanceGuard(ladder(settings.drafters, settings.device).arms, settings.sd_canary),
        SwitchLog(),
        PolicyChanges(
            policies.make,
            equipment.prepare,
            equipment.prepared,
            lambda: not scheduler.gate.asleep and no_push(),
            scheduler.faults,
        ),
        lambda: activity is not None and activity.runs,
    )


def _in_use(live: Live) -> WeightsInUse:
    return WeightsInUse(live.target.content, live.drafter_content)


def _made_by(settings: DecidedSettings, gpu: Gpu, device: Device, live: Live) -> dict[str, str]:
    """Return everything that the times of steps depend on, as in error messages."""
    return {
        **code(),
        "processor": gpu.description if device.name == "cuda" else processor(),
        "threads": str(settings.threads),
        "model": live.target.network.config.shape,
        "dtype": settings.types,
        "numerics": device.numerics,
        "reduction_leaves": str(settings.reduction_leaves),
        "tensor_parallel": str(settings.tensor_parallel),
        "drafter_parallel": settings.drafter_parallel,
        "attention": settings.attention,
        "drafters": f"{'+'.join(settings.drafters)} {live.draft_network}".strip(),
        "max_running": str(settings.max_running),
    }


def _describe(
    choice: DeviceChoice,
    gpu: Gpu,
    device: Device,
    live: Live,
    memory: Memory,
    equipment: Equipment,
    max_model_len: int,
    phases: dict[str, float],
    lost: dict[str, str],
) -> EngineInfo:
    settings, model = choice.settings, live.target.network
    return EngineInfo(
        model=settings.served_model_name or Path(settings.model).resolve().name,
        weight_version=live.target.version,
        drafter_version=live.drafter_version,
        drafter_quantization=live.drafter_quantization,
        adapters={name: part.version for name, part in live.adapters.items()},
        vocab_size=model.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=list(model.eos_token_ids),
        pages=memory.pages,
        page_size=settings.page_size,
        max_running=settings.max_running,
        drafter="+".join(settings.drafters) or "none",
        policy=settings.policy,
        numerics=device.numerics,
        fingerprint=device.fingerprint,
        libraries=libraries(),
        tensor_parallel=settings.tensor_parallel,
        max_rows=settings.max_rows,
        attention=settings.attention,
        dtype=settings.dtype,
        device=device.name,
        gpu=gpu.description if device.name == "cuda" else "",
        products=equipment.matmuls,  # the name on the wire
        graphs=settings.graphs,
        choices=choice.reasons,
        threads=settings.threads,
        phases=phases,
        pid=os.getpid(),
        rank_pids=equipment.ranks.pids,
        training_device=settings.drafter_training_device,
        spooled=bool(settings.state_dir),
        stages=settings.weight_staging != "none",
        lost=lost,
    )


def _options(settings: DecidedSettings, device: Device) -> Options:
    state, drafter = _state(settings), settings.drafter_directory
    spool = Spool(state, str(Path(settings.model).resolve())) if state else None
    intake = Intake(
        Path(settings.weight_root) if settings.weight_root else None,
        settings.weight_marker,
        state and state / "uploads",
        made_directory(settings.directory) if "ipc" in settings.channels else None,
        trained=settings.trained,
        pulled=spool.directory if spool else None,
        tls=settings.peer_tls,
        groups=Groups(settings.weight_timeout_s),
    )
    return Options(
        settings.channels,
        intake,
        spool,
        max_loras=settings.max_loras,
        max_lora_rank=settings.max_lora_rank,
        parse_calibration=(
            find_loader(drafter, settings.device).parse_calibration if drafter else _unexpected
        ),
        storage=Storage(
            settings.weight_staging, device.free, device.device, state and state / "staged"
        ),
    )


def _unexpected(content: bytes, source: str) -> object:
    raise AssertionError("a calibration table for a server without a drafter's network")


def _policies(settings: DecidedSettings, device: Device) -> Policies:
    knowledge = Knowledge(settings.drafters, settings.device)
    learning = lru_cache(KEPT_POLICIES)(partial(_learning_policy, settings, knowledge, device))
    make = partial(_make_policy, settings, learning)
    return Policies(knowledge, make(SetPolicy(settings.policy, settings.strategy)), make)


def _make_policy(
    settings: DecidedSettings,
    learning: Callable[[str, Strategy | None, Arms | None], Policy],
    command: SetPolicy,
) -> Policy:
    """Return the policy that a command requests, with its earlier knowledge if it was active
    before.
    """
    named = [command.strategy, *(pin.strategy for pin in command.pins)]
    named += command.arms.strategies if command.arms else ()
    for strategy in named:
        if strategy and strategy.drafter and strategy.drafter not in settings.drafters:
            raise InvalidRequest(
                f"strategy {strategy.name!r} needs the drafter {strategy.drafter!r}; loaded: "
                f"{', '.join(settings.drafters) or 'none'}"
            )
    policy = learning(command.policy, command.strategy, command.arms)
    pins = (*command.pins, *limit(settings.sd_max_batch))
    return Pinned(policy, pins) if pins else policy


def _learning_policy(
    settings: DecidedSettings,
    knowledge: Knowledge,
    device: Device,
    name: str,
    strategy: Strategy | None,
    arms: Arms | None,
) -> Policy:
    known = ladder(settings.drafters, settings.device).within(arms)
    first = strategy or known.arms[-1]
    setup = Setup(known, first, knowledge, device.sizes, arms, device.recordings)
    policy: Policy = POLICIES.resolve(name).make(setup)
    return policy
