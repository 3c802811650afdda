"""`tlt bench record`: a rollout as a file, from which `tlt bench replay` judges any policy.

The rollout runs once per `--policy`, and its cycles are timed. Then it runs once more per
`--width` with a tree drafted at every position and nothing verified but the root, so that every
position is a root once. Since a response is fixed by weights, prompt and seed, these trees are the
ones that any policy would have had drafted. How exact that is:

- a chain of depth d is the head of a longer one, and a tree of d levels the head of one of more
  levels, as the tree builder plants level after level;
- a tree of width 2 is not a part of one of width 4: the builder expands other nodes. So each width
  is recorded by itself;
- a tree is grown in the order of acceptance probability under the table of the recording. A replay
  that has learned another table would have expanded a few other nodes. Chains do not depend on it;
- on a GPU a node with a probability below 2 % is not expanded, by the table of the recording.

    tlt bench record --out /tmp/rollout.safetensors
    tlt bench record --device cuda --model DIR --drafter DIR --out gpu.safetensors
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from tlt_server.bench.engines import renamed
from tlt_server.bench.record import finish, machine, steps, wide_console
from tlt_server.bench.replaying.names import policy_name
from tlt_server.bench.replaying.playing import Played, WatchedRunner, play
from tlt_server.bench.settings import described, settings_of
from tlt_server.demo.workload import problems_as_requests
from tlt_server.engine.loop import Engine
from tlt_server.engine.runner import Finished
from tlt_server.engine.settings import EngineSettings
from tlt_server.engine.start.assembly import assemble
from tlt_server.engine.start.profiling import nothing_learnt
from tlt_server.errors import StartupError
from tlt_server.samples.identity import identity_of
from tlt_server.samples.samples import Legend, Responses, Verifications, filters_of
from tlt_server.speculation.batch import Candidates
from tlt_server.speculation.calibration import Calibration
from tlt_server.speculation.cost import CostModel, CostRecord, Measured, load_of
from tlt_server.speculation.drafters import DRAFTERS
from tlt_server.speculation.policies.fixed import Fixed
from tlt_server.speculation.recorded import (
    NONE,
    DraftedTrees,
    RecordedCycles,
    RecordedRun,
    RecordedTrees,
    RecordHeader,
    RolloutRecord,
    Table,
)
from tlt_server.wire.commands import SetPolicy, Submit
from tlt_server.wire.events import EngineInfo
from tlt_server.wire.records import Cycle, GenerateRequest, Strategy

SIZES = {"cpu": (64, 64), "cuda": (512, 256)}  # requests, and how many run at once
QUICK = 16  # requests
STALL = 3.0  # times the expected seconds from which a cycle says nothing of its shape


def run(args: argparse.Namespace) -> int:
    """Write the record; print its size and one line of JSON."""
    if args.numerics != "strict":
        raise StartupError(
            "--numerics is fast; only strict numerics give the same responses to every policy: "
            "leave the flag out"
        )
    requests, running = SIZES[args.device]
    requests = args.requests or (QUICK if args.quick else requests)
    running = args.running or min(running, requests)
    max_tokens = args.max_tokens or (96 if args.quick else 2000)
    changes = {"max_running": running, "policy": "goodput", "sd_canary": 0.0}
    settings = settings_of(args, max_tokens + 256, **changes)
    work = problems_as_requests(
        settings.model, requests, group=args.group, seed=args.seed, max_tokens=max_tokens
    )
    policies = args.policy or _default_policies(settings)
    halves = {name: DRAFTERS[name].half(args.device) for name in settings.drafters}
    drafted = [
        DraftedTrees(name, half.deepest, width)
        for name, half in halves.items()
        if DRAFTERS[name].needs_weights
        for width in args.width or half.widths
    ]
    console = wide_console()
    turns = (len(policies) * (1 + (args.device == "cuda")) + len(drafted)) * len(work)
    with steps(console, turns) as step:
        record = recorded(
            settings, work, policies, drafted, lambda name: step(name.replace(":", " "))
        )
    record.save(args.out)
    report = {
        "bench": "record",
        "quick": bool(args.quick),
        **record.header.described,
        "requests": len(work),
        "tokens": int(record.responses.output_len_N.sum()),
        "cycles": len(record.cycles.run_C),
        "runs_s": {run.policy: round(run.seconds, 3) for run in record.header.runs},
        "bytes": args.out.stat().st_size,
    }
    finish(args, report)
    return 0


def _default_policies(settings: EngineSettings) -> list[SetPolicy]:
    chains = [
        SetPolicy("fixed", Strategy(name, depth, 1, depth + 1))
        for name in settings.drafters
        if DRAFTERS[name].needs_weights
        for depth in (2, 4, 7)
    ]
    return [SetPolicy("off"), *chains, SetPolicy("beg"), SetPolicy("goodput")]


def recorded(
    settings: EngineSettings,
    requests: list[GenerateRequest],
    policies: list[SetPolicy],
    drafted: list[DraftedTrees],
    on_end: Callable[[str], None] = lambda name: None,
) -> RolloutRecord:
    """Run the rollout under every policy, then draft at every position."""
    for command in policies:
        if command.strategy and command.strategy.drafter not in settings.drafters:
            raise StartupError(
                f"--policy {policy_name(command)} needs the drafter {command.strategy.drafter!r}; "
                f"loaded: {', '.join(settings.drafters) or 'none'}. Use one of these, or another "
                "--drafter"
            )
    engine, info = assemble(settings)
    runner = engine.runner
    watched = WatchedRunner(runner)
    engine.runner = watched
    turns = 1 + (info.device == "cuda")  # the first one records graphs
    runs = _played(engine, watched, requests, policies, on_end, turns)
    responses = _responses(requests, runs[0])
    if settings.device != "cpu":
        from tlt_server.engine.gpu.runner import GpuRunner

        assert isinstance(runner, GpuRunner)
        runner.copy_all_trees()
    trees = {
        grown.name: _trees(engine, watched, requests, responses, grown, settings, on_end)
        for grown in drafted
    }
    tables = {}
    for name in {grown.drafter for grown in drafted}:
        assert settings.drafter_directory is not None
        shipped = Calibration.load(settings.drafter_directory)
        tables[name] = Table(shipped.prior_K, shipped.gap_edges)
    header = _header(settings, engine, info, drafted, [*zip(policies, runs, strict=True)])
    verified, cycles = _cycles(runs, [*header.legend.strategies])
    return RolloutRecord(header, responses, verified, cycles, trees, tables)


def _played(
    engine: Engine,
    watched: WatchedRunner,
    requests: list[GenerateRequest],
    policies: list[SetPolicy],
    on_end: Callable[[str], None],
    turns: int,
) -> list[Played]:
    """Run the rollout in turns under each policy; the last turn counts. `StartupError`: responses
    differ.
    """
    runs: list[Played] = []
    for command in policies:
        name = policy_name(command)
        for turn in range(turns):
            played = play(engine, watched, renamed(requests, f"{name}{turn}"), command, on_end)
        runs.append(played)
        if played.outputs != runs[0].outputs:
            raise StartupError(
                f"responses under {name} differ from those under {policy_name(policies[0])}: find "
                "the fault with `tlt bench exact`, as a record of responses that differ is of no "
                "use"
            )
    return runs


def _header(
    settings: EngineSettings,
    engine: Engine,
    info: EngineInfo,
    drafted: list[DraftedTrees],
    runs: list[tuple[SetPolicy, Played]],
) -> RecordHeader:
    identity, cycles = identity_of(settings.model), [c for _, run in runs for c in run.cycles]
    return RecordHeader(
        device=info.device,
        legend=Legend(
            vocab_size=info.vocab_size,
            model=identity.model,
            template=identity.template,
            versions=(info.weight_version,),
            end_reasons=tuple(dict.fromkeys(runs[0][1].ends)),
            strategies=tuple(dict.fromkeys(timed.cycle.strategy for timed in cycles)),
        ),
        eos_token_ids=tuple(info.eos_token_ids),
        page_size=info.page_size,
        pages=info.pages,
        max_model_len=info.max_model_len,
        max_running=info.max_running,
        max_rows=info.max_rows,
        max_draft_rows=settings.max_draft_rows,
        drafters=tuple(engine.choice.knowledge.estimates),
        trees=tuple(drafted),
        runs=tuple(
            RecordedRun(policy_name(command), run.seconds, run.known) for command, run in runs
        ),
        cost=_fitted(timed.cycle for timed in cycles),
        described=described(replace(settings, max_running=info.max_running), info.fingerprint),
        machine=machine(on_gpu=info.device == "cuda"),
    )


def _fitted(cycles: Iterator[Cycle]) -> CostRecord:
    """Fit the times of steps to all cycles, without stalled ones."""
    measured = [Measured(load_of(cycle), cycle.step_s) for cycle in cycles]
    model = CostModel()
    model.profile(measured)
    model.profile(m for m in measured if m.seconds < STALL * model.predict(m.load))
    return model.record()


def _responses(requests: list[GenerateRequest], played: Played) -> Responses:
    texts = [[*r.token_ids, *out] for r, out in zip(requests, played.outputs, strict=True)]
    length_N = np.array([len(text) for text in texts], np.int64)
    groups = {group: i for i, group in enumerate(dict.fromkeys(r.group_id for r in requests))}
    reasons = {reason: i for i, reason in enumerate(dict.fromkeys(played.ends))}
    sampling = [request.sampling for request in requests]
    return Responses(
        token_T=np.concatenate([np.array(text, np.int32) for text in texts]),
        start_N=np.cumsum(length_N) - length_N,
        prompt_len_N=np.array([len(r.token_ids) for r in requests], np.int32),
        group_N=np.array([groups[r.group_id] for r in requests], np.int32),
        seed_N=np.array([r.seed for r in requests], np.uint64),
        temperature_N=np.array([s.temperature for s in sampling], np.float32),
        filters_N=filters_of(sampling),
        max_tokens_N=np.array([s.max_tokens for s in sampling], np.int32),
        end_N=np.array([reasons[end] for end in played.ends], np.uint8),
        span_request_S=np.arange(len(requests), dtype=np.int32),
        span_start_S=np.zeros(len(requests), np.int32),
        span_version_S=np.zeros(len(requests), np.int32),
    )


def _cycles(runs: list[Played], strategies: list[Strategy]) -> tuple[Verifications, RecordedCycles]:
    all_cycles = [(i, timed) for i, played in enumerate(runs) for timed in played.cycles]
    cycles = [timed.cycle for _, timed in all_cycles]
    verified = [(c, v) for c, (_, timed) in enumerate(all_cycles) for v in timed.verified]
    strategy_C = np.array([strategies.index(c.strategy) for c in cycles], np.int32)
    cycle_V = np.array([c for c, _ in verified], np.int32)

    def numbers(values: list[int]) -> NDArray[np.int32]:
        return np.array(values, np.int32)

    return Verifications(
        request_V=numbers([v.request for _, v in verified]),
        root_V=numbers([v.root for _, v in verified]),
        rows_V=np.array([v.rows for _, v in verified], np.uint16),
        accepted_V=np.array([v.accepted for _, v in verified], np.uint8),
        own_rows_V=np.array([v.own_rows for _, v in verified], np.uint16),
        own_accepted_V=np.array([v.own_accepted for _, v in verified], np.uint8),
        strategy_V=strategy_C[cycle_V].astype(np.uint16),
        calibration_V=np.zeros(len(verified), np.uint16),
    ), RecordedCycles(
        run_C=np.array([i for i, _ in all_cycles], np.uint8),
        strategy_C=strategy_C,
        decoding_C=numbers([c.context.decoding for c in cycles]),
        prompt_rows_C=numbers([c.context.prefill_rows for c in cycles]),
        context_C=np.array([c.context.mean_context for c in cycles], np.float32),
        rows_C=numbers([c.rows for c in cycles]),
        drafted_C=numbers([c.drafted for c in cycles]),
        emitted_C=numbers([c.emitted for c in cycles]),
        seconds_C=np.array([c.step_s for c in cycles], np.float32),
        cycle_V=cycle_V,
    )


def _trees(
    engine: Engine,
    watched: WatchedRunner,
    requests: list[GenerateRequest],
    responses: Responses,
    grown: DraftedTrees,
    settings: EngineSettings,
    on_end: Callable[[str], None],
) -> RecordedTrees:
    """Draft a tree at every position."""
    positions = int(responses.output_len_N.sum())
    trees = RecordedTrees(
        np.zeros(positions, np.uint16),
        np.zeros((positions, grown.columns), np.uint8),
        np.full((positions, grown.columns), NONE, np.uint16),
        np.full((positions, grown.depth), NONE, np.uint16),
    )
    waiting = renamed(requests, grown.name)
    index = {request.id: n for n, request in enumerate(waiting)}
    waiting.reverse()
    # One row: nothing is verified but the root.
    look = Strategy(grown.drafter, grown.depth, grown.width, rows=1)
    room = _room(look, settings)
    with nothing_learnt(engine):
        engine.choice.policy = Fixed(look)
        running = 0
        while waiting or not engine.idle:
            if fresh := [waiting.pop() for _ in range(min(room - running, len(waiting)))]:
                engine.send(Submit(fresh))
                running += len(fresh)
            for output in engine.step():
                if output.finish_reason:
                    running -= 1
                    on_end(f"drafts, {grown.name}")
            if watched.finished is not None and watched.finished.drafted is not None:
                _keep(watched.finished, watched.root_W, index, responses, trees)
    return trees


def _room(look: Strategy, settings: EngineSettings) -> int:
    """Return the number of requests that can draft together without cutting their trees."""
    running = settings.max_running
    assert running is not None
    if settings.device == "cpu":
        return max(1, min(running, settings.max_draft_rows // (look.depth * look.width)))
    from tlt_server.engine.gpu.steps.buckets import Shapes, fitted

    shapes = Shapes(running, look.depth)

    def cuts(requests: int) -> bool:
        padded = max(shapes.batch(requests, prompts=prompts) for prompts in (False, True))
        return fitted(look, padded, look.depth) != look

    while running > 1 and cuts(running):
        running -= 1
    return running


def _keep(
    finished: Finished,
    root_W: list[int],
    index: Mapping[str, int],
    responses: Responses,
    trees: RecordedTrees,
) -> None:
    """Write the trees of one step to their positions."""
    assert finished.drafted is not None
    candidates = finished.drafted.candidates
    chunks = zip(finished.batch.chunks, root_W, strict=True)
    decoding = [(chunk, root) for chunk, root in chunks if chunk.decodes]
    first_B = np.searchsorted(candidates.request_N, np.arange(len(decoding) + 1))
    for b, (chunk, root) in enumerate(decoding):
        nodes = slice(int(first_B[b]), int(first_B[b + 1]))
        own = int(np.count_nonzero(candidates.rank_N[nodes] >= 0))  # branches come after them
        nodes = slice(nodes.start, nodes.start + own)
        if root >= 0 and nodes.stop > nodes.start:
            n, known = index[chunk.sequence.id], root + 1
            at = int(responses.position_N[n]) + known - int(responses.prompt_len_N[n])
            _keep_tree(candidates, nodes, responses.tokens(n)[known:], trees, at)


def _keep_tree(
    candidates: Candidates, nodes: slice, follow_T: NDArray[np.int32], trees: RecordedTrees, at: int
) -> None:
    """Write one tree. `follow_T`: the response's tokens after the root."""
    count = nodes.stop - nodes.start
    parent_M = candidates.parent_N[nodes]
    parent_M = np.where(parent_M < 0, -1, parent_M - nodes.start)
    trees.count_P[at] = count
    trees.cell_PM[at, :count] = candidates.cell_N[nodes]
    trees.parent_PM[at, :count] = np.where(parent_M < 0, NONE, parent_M)
    above = -1
    for depth, token in enumerate(follow_T[: trees.own_PD.shape[1]]):
        own = np.flatnonzero((parent_M == above) & (candidates.token_N[nodes] == token))
        if not len(own):
            break
        above = int(own[0])
        trees.own_PD[at, depth] = above
