"""A rollout replayed under a policy: the real scheduler, policy and knowledge around a runner that
looks outcomes up.

Tokens come from the record, seconds from its cost model. On a GPU the outcome of a step arrives one
step late, as in reality. `limits` simulates a device, `drafts` its drafters.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from tlt_server.bench.replaying.drafts import Drafts, drafts_of
from tlt_server.bench.replaying.hindsight import Best, Hindsight, OpenStep
from tlt_server.bench.replaying.limits import Limits, limits_of
from tlt_server.engine.gate import StepGate
from tlt_server.engine.gpu.steps.tree_samples import EVERY
from tlt_server.engine.runner import Finished
from tlt_server.engine.sampling.sampler import SamplingState
from tlt_server.engine.schedule.batch import Batch, Chunk
from tlt_server.engine.schedule.pages import PagePool
from tlt_server.engine.schedule.running import RunningSet
from tlt_server.engine.schedule.scheduler import Scheduler
from tlt_server.engine.schedule.sequence import Emission, Sequence
from tlt_server.errors import StartupError
from tlt_server.speculation.accept import accepted_drafts, on_path
from tlt_server.speculation.batch import Candidates, DraftBatch
from tlt_server.speculation.branches import Proposing, with_branches
from tlt_server.speculation.cost import CostModel, load_of
from tlt_server.speculation.drafters import DRAFTERS
from tlt_server.speculation.knowledge import Drafted, Knowledge
from tlt_server.speculation.policies import POLICIES, Policy, Setup
from tlt_server.speculation.policies.arms import ladder
from tlt_server.speculation.recorded import RolloutRecord
from tlt_server.speculation.tree import select
from tlt_server.wire.commands import SetPolicy
from tlt_server.wire.records import Cycle, Strategy

Verified = tuple[int, int, int]  # request, position of the root, accepted drafts


class ReplayedCycle(NamedTuple):
    cycle: Cycle
    best: Best | None
    verified: list[Verified]
    expected: float  # tokens, by the survivals of the rows that were verified


class OpenCycle(NamedTuple):
    """A step with unknown outcome."""

    finished: Finished
    verified: list[Verified]
    expected: float


class ReplayResult(NamedTuple):
    cycles: list[ReplayedCycle]
    knowledge: Knowledge

    @property
    def seconds(self) -> float:
        return sum(c.cycle.step_s for c in self.cycles)

    @property
    def tokens(self) -> int:
        return sum(c.cycle.emitted for c in self.cycles)


class ReplayRunner:
    """A runner that looks up what the device would have computed."""

    def __init__(
        self,
        record: RolloutRecord,
        cost: CostModel,
        drafts: dict[str, Drafts],
        branched: Mapping[str, Proposing],
        limits: Limits,
    ) -> None:
        self._responses, self._cost = record.responses, cost
        self._drafts, self._branched, self._limits = drafts, branched, limits
        self._output_len_N = record.responses.output_len_N
        self._known_N = np.zeros(len(record.responses), np.int64)  # output tokens on the device
        self._deepest = max((trees.depth for trees in record.header.trees), default=0) + 16
        self._flights: deque[OpenCycle] = deque()
        self._drafted_steps = 0

    def step(self, batch: Batch) -> OpenStep:
        """Return a step before it runs."""
        decoding = [chunk for chunk in batch.chunks if chunk.decodes and self._left(chunk)]
        responses = self._responses
        number_B = np.array([int(chunk.sequence.id) for chunk in decoding], np.int64)
        root_B = responses.prompt_len_N[number_B] + self._known_N[number_B] - 1
        capacity_B = np.array([chunk.sequence.capacity for chunk in decoding], np.int64)
        no_pages_BP = np.zeros((len(decoding), 0), np.int32)
        return OpenStep(
            batch.context,
            DraftBatch.of(responses, number_B, root_B, no_pages_BP, capacity_B),
            responses.after(number_B, root_B, self._deepest),
            self._output_len_N[number_B] - self._known_N[number_B],
            sum(c.samples and not c.decodes and self._left(c) > 0 for c in batch.chunks),
        )

    def launch(self, batch: Batch, step: OpenStep, strategy: Strategy) -> None:
        requests, live = batch.context.decoding, len(step.batch)
        rows = self._limits.of(strategy, requests, live, prompts=step.prompts)
        drafter = self._branched.get(rows.strategy.drafter)
        candidates, chosen_N, own_N = Candidates.empty(), np.zeros(0, np.int32), np.zeros(0, bool)
        if drafter is not None and live:
            candidates = drafter.propose(step.batch, rows.strategy)
            ranked_N = self._limits.ranked(candidates.acceptance_N)
            chosen_N, _, _ = select(replace(candidates, acceptance_N=ranked_N), live, rows.drafts)
            own_N = on_path(candidates, step.follow_BD)
            outcome_N = np.full(len(candidates), -1, np.int8)
            outcome_N[chosen_N] = own_N[chosen_N]
            drafter.observe(step.batch, candidates, outcome_N)
        accepted_B = accepted_drafts(candidates, chosen_N, own_N, live).tolist()
        verified = [
            (int(name), len(tokens) - 1, accepted)
            for name, tokens, accepted in zip(
                step.batch.ids, step.batch.tokens, accepted_B, strict=True
            )
        ]
        gains_N = candidates.acceptance_N[chosen_N] * step.counts(candidates)[chosen_N]
        emissions = self._emissions(batch, dict(zip(step.batch.ids, accepted_B, strict=True)))
        asked_1, chosen_1 = np.array([rows.drafts]), np.array([len(chosen_N)])
        cycle = Cycle(
            context=batch.context,
            strategy=rows.strategy,
            rows=int(self._limits.read(batch.context, live, asked_1, chosen_1)[0]),
            accepted=tuple(accepted_B),
            drafted=len(chosen_N),
        )
        cycle = msgspec.structs.replace(cycle, step_s=self._cost.predict(load_of(cycle)))
        drafted = None
        if drafter is not None and len(candidates):
            drafted = self._reported(rows.strategy, candidates, chosen_N, live)
        finished = Finished(batch, emissions, cycle, drafted)
        self._flights.append(OpenCycle(finished, verified, step.plain + float(gains_N.sum())))

    @property
    def in_flight(self) -> int:
        return len(self._flights)

    def collect(self, *, busy: bool) -> OpenCycle | None:
        if len(self._flights) <= int(busy and self._limits.late):
            return None
        return self._flights.popleft()

    def end(self, sequence: Sequence) -> None:
        """Note for the drafters that a sequence has ended."""
        request = sequence.request
        for drafter in self._drafts.values():
            drafter.finish(sequence.id, request.group_id, sequence.tokens, sequence.prompt_len, "")

    def _left(self, chunk: Chunk) -> int:
        n = int(chunk.sequence.id)
        return int(self._output_len_N[n] - self._known_N[n])

    def _emissions(self, batch: Batch, accepted: dict[str, int]) -> list[Emission]:
        """Give each sampling chunk its next tokens, and advance the device's state."""
        emissions = []
        for chunk in batch.chunks:
            n = int(chunk.sequence.id)
            left = self._left(chunk)
            if not chunk.samples or not left:
                emissions.append(Emission())
                continue
            count = min(1 + (accepted[chunk.sequence.id] if chunk.decodes else 0), left)
            first = chunk.sequence.prompt_len + int(self._known_N[n])
            tokens = self._responses.tokens(n)[first : first + count].tolist()
            self._known_N[n] += count
            emissions.append(Emission(tokens=tokens, logprobs=[0.0] * count))
        return emissions

    def _reported(
        self, strategy: Strategy, candidates: Candidates, chosen_N: NDArray[np.int32], live: int
    ) -> Drafted | None:
        """Return the trees that the host would see."""
        predicted = float(candidates.acceptance_N[chosen_N].sum())
        if not self._limits.late:
            return Drafted(candidates, live, predicted)
        self._drafted_steps += 1
        some = self._limits.seen(strategy, live)
        if self._drafted_steps % EVERY != 1 or not some:
            return None
        count = int(np.searchsorted(candidates.request_N, some))
        part = Candidates(*(values[:count] for values in vars(candidates).values()))
        return Drafted(part, some, predicted if some == live else 0.0)


class Replay:
    """One rollout under one policy, or, without one, under the best choice of every step."""

    def __init__(
        self,
        record: RolloutRecord,
        command: SetPolicy | None,
        *,
        judged: bool = True,
        knowledge: Knowledge | None = None,
    ) -> None:
        header = record.header
        self.record, self.judged = record, judged or command is None
        cost = CostModel()
        cost.restore(header.cost)
        drafts, limits = drafts_of(record), limits_of(header)
        branched = with_branches(drafts)
        self.runner = ReplayRunner(record, cost, drafts, branched, limits)
        self.hindsight = Hindsight(branched, limits, cost, header.device)
        self.knowledge = knowledge or known_at_start(record)
        arms = ladder(header.drafters, header.device)
        strategy = command.strategy if command and command.strategy else arms.arms[-1]
        self.policy: Policy | None = None
        if command is not None:
            setup = Setup(arms, strategy, self.knowledge, limits.sizes)
            self.policy = POLICIES.resolve(command.policy).make(setup)
        halves = (DRAFTERS[name].half(header.device) for name in header.drafters)
        self._seconds = 0.0
        pool = PagePool(header.pages, header.page_size)
        self.scheduler = Scheduler(
            StepGate(),
            RunningSet(
                pool,
                max_running=header.max_running,
                max_pages_per_sequence=-(-header.max_model_len // header.page_size),
            ),
            max_rows=header.max_rows,
            lookahead=max(strategy.depth, *(half.deepest for half in halves), 0),
            weight_version=header.legend.versions[0],
            prompt_budget=limits.room,
            on_end=self.runner.end,
            clock=lambda: self._seconds,
        )

    def run(self, on_tokens: Callable[[int], None] = lambda count: None) -> ReplayResult:
        """Replay the whole rollout. `on_tokens`: called with the tokens of each step."""
        header, responses = self.record.header, self.record.responses
        self.scheduler.submit(
            Sequence(
                request,
                SamplingState(request, header.legend.vocab_size, header.eos_token_ids),
                header.page_size,
            )
            for request in map(responses.request, range(len(responses)))
        )
        cycles: list[ReplayedCycle] = []
        bests: deque[Best | None] = deque()
        while not self.scheduler.idle or self.runner.in_flight:
            batch = self.scheduler.next_batch()
            if batch is not None:
                step = self.runner.step(batch)
                best = self.hindsight.best(step) if self.judged else None
                strategy = self._choose(step, best)
                bests.append(best)
                self.runner.launch(batch, step, strategy)
                self.scheduler.launched(batch, strategy.depth)
            found = self.runner.collect(busy=batch is not None)
            if found is not None:
                cycles.append(self._commit(found, bests.popleft()))
                on_tokens(cycles[-1].cycle.emitted)
        return ReplayResult(cycles, self.knowledge)

    def _choose(self, step: OpenStep, best: Best | None) -> Strategy:
        if self.policy is not None:
            return self.policy.choose(step.context)
        assert best is not None
        return best.strategy

    def _commit(self, flight: OpenCycle, best: Best | None) -> ReplayedCycle:
        finished = flight.finished
        self.scheduler.commit(finished.batch, finished.emissions)
        emitted = sum(len(emission.tokens) for emission in finished.emissions)
        cycle = msgspec.structs.replace(finished.cycle, emitted=emitted)
        self._seconds += cycle.step_s
        self.scheduler.observe(finished.batch, 1e3 * cycle.step_s)
        self.knowledge.observe(cycle, finished.drafted)
        if self.policy is not None:
            self.policy.observe(cycle)
        return ReplayedCycle(cycle, best, flight.verified, flight.expected)


def known_at_start(record: RolloutRecord) -> Knowledge:
    """Return the recorded engine's knowledge at the start of its first run."""
    knowledge = Knowledge(record.header.drafters, record.header.device)
    known = next((run.known for run in record.header.runs if run.known is not None), None)
    try:
        if known is not None:
            knowledge.weights = known.learnt[-1].weights
            knowledge.restore(known)
    except ValueError as error:
        raise StartupError(f"the record's knowledge does not fit this version: {error}") from error
    return knowledge
