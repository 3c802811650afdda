"""The scheduler driven by a fake runner: the output of every sequence must equal a twin that runs
it alone.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.fake_kv import PAGE, FakeKV, alone, collect, make, run, sequence
from tlt_server.engine.gate import Reason, StepGate
from tlt_server.engine.gpu.steps.buckets import PromptShape, Shapes
from tlt_server.engine.schedule.batch import Batch
from tlt_server.engine.schedule.scheduler import Scheduler, unpadded
from tlt_server.engine.schedule.sequence import Emission, Sequence
from tlt_server.errors import InvalidRequest
from tlt_server.wire.commands import InFlight
from tlt_server.wire.records import StepOutput


@pytest.mark.slow
@settings(max_examples=120, deadline=None)
@given(
    pages=st.integers(6, 24),
    max_running=st.integers(1, 5),
    max_rows=st.integers(1, 12),
    late=st.integers(0, 1),
    padded=st.booleans(),
    seed=st.integers(0, 2**32),
    jobs=st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 10), st.integers(0, 12), st.integers(0, 12)),
        min_size=1,
        max_size=9,
    ),
    aborts=st.sets(st.integers(0, 8), max_size=2),
    pushes=st.dictionaries(
        st.integers(1, 30),
        st.tuples(
            st.sampled_from(["v1", "v2", "v3"]),
            st.sampled_from(["continue", "recompute", "abort", "drain"]),
        ),
        max_size=4,
    ),
    flushes=st.sets(st.integers(1, 30), max_size=3),
    owners=st.integers(1, 4),
    priorities=st.integers(1, 3),
    row_ms=st.sampled_from([0.0, 0.1, 5.0]),
    texts=st.lists(st.integers(2, 24), max_size=4),
    patients=st.sets(st.integers(0, 8)),
)
def test_every_sequence_ends_as_when_run_alone(
    pages: int,
    max_running: int,
    max_rows: int,
    late: int,
    padded: bool,
    seed: int,
    jobs: list[tuple[int, int, int, int]],
    aborts: set[int],
    pushes: dict[int, tuple[str, InFlight]],
    flushes: set[int],
    owners: int,
    priorities: int,
    row_ms: float,
    texts: list[int],
    patients: set[int],
) -> None:
    """Weight pushes come in between: the fake model is the same in all versions, so only wrong KV
    could change a token. The device delivers its results `late` steps later and may pad batches,
    and there are flushes while steps are in flight. Several owners share it, so that sequences
    are preempted for others' shares, and left out of steps where rows take time (`row_ms`). Some
    outputs are gathered, for 5 turns at most. While nothing runs, texts are read in the background,
    until the next command.
    """
    now_s = 0.0
    shapes = Shapes(max_running, 4, PromptShape(sizes=(2, 4), chunks=2, grain=4))
    gate = StepGate()
    scheduler, kv = make(
        pages,
        max_running=max_running,
        max_rows=max_rows,
        gate=gate,
        prompt_budget=shapes.room if padded else unpadded,
        clock=lambda: now_s,
    )
    draw = random.Random(seed)
    sequences = {
        i: sequence(
            i,
            [(family * 7 + p) % 45 for p in range(length)],
            max_tokens,
            seed + i,
            owner="abcd"[i % owners],
            priority=i % priorities,
            patient=i in patients,
        )
        for i, (family, length, max_tokens, _) in enumerate(jobs)
        if -(-(length + max_tokens) // PAGE) <= pages
    }
    arrival = {i: jobs[i][3] for i in sequences}
    seen: dict[str, list[StepOutput]] = {}
    aborted = {i for i in aborts if i in sequences}
    versions: dict[str, list[str]] = {s.id: [] for s in sequences.values()}
    due: list[tuple[str, InFlight]] = []

    read = Read(kv)
    left = [
        [(n + p) % 45 for p in range(length)]
        for n, length in enumerate(texts)
        if -(-length // PAGE) <= pages
    ]

    flying: list[tuple[Batch, list[Emission]]] = []

    def land() -> None:
        batch, emissions = flying.pop(0)
        live = [not chunk.void for chunk in batch.chunks]
        outputs = scheduler.commit(batch, emissions)
        scheduler.observe(batch, 1 + row_ms * sum(w.end - w.start for w in batch.chunks))
        for chunk, emission, counts in zip(batch.chunks, emissions, live, strict=True):
            if counts and emission.tokens:
                versions[chunk.sequence.id] += [batch.weight_version] * len(emission.tokens)
        collect(outputs, seen)

    def push() -> None:
        while flying:
            land()
        version, in_flight = due[0]
        if in_flight == "drain" and scheduler.started():
            gate.hold(Reason.DRAINING)
        else:
            gate.release(Reason.DRAINING)
            del due[0]
            ended = scheduler.change_version(version, in_flight)
            assert in_flight == "abort" or not any(output.finish_reason for output in ended)
            assert in_flight == "continue" or not scheduler.gauges()["spanning"]
            aborted.update(int(output.id[1:]) for output in ended if output.finish_reason)
            collect(ended, seen)

    for at in range(900):
        now_s = 0.06 * at
        collect(scheduler.expire(), seen)
        due += [pushes[at]] if at in pushes else []
        if due or at in flushes or at == 7 or at in arrival.values():
            scheduler.abandon()
        elif left and scheduler.idle and gate.state == "open":
            for n, text in enumerate(left):
                scheduler.submit([background(n, text, read)])
        if due:
            push()
            scheduler.check()
            kv.check_versions(scheduler)
        if at in flushes:
            scheduler.forget_prefixes()
            kv.flushes += 1
        scheduler.submit([sequences[i] for i, arrives in arrival.items() if arrives == at])
        if at == 7:
            collect(scheduler.abort([f"r{i}" for i in aborted]), seen)
        scheduler.check()
        if batch := scheduler.next_batch():
            scheduler.check()
            assert sum(w.end - w.start for w in batch.chunks) <= max(
                max_rows, sum(w.decodes for w in batch.chunks)
            )
            flying.append((batch, run(scheduler, batch, kv, draw)))
        while len(flying) > (late if batch else 0):
            land()
        scheduler.check()
        kv.check_published(scheduler.pool)
        kv.check_versions(scheduler)
        left = [text for text in left if text not in read.texts]
        if at > 30 and scheduler.idle and not due and not left:
            break
    assert scheduler.idle, "sequences are stuck"
    assert not left, "a text was never read"
    assert scheduler.pool.available == pages, "pages leak"
    for i, s in sequences.items():
        tokens = tokens_of(seen[s.id])
        expected, reason = alone(s.request)
        last = seen[s.id][-1]
        if last.finish_reason == "abort":
            assert i in aborted and tokens == expected[: len(tokens)]
        else:
            assert (tokens, last.finish_reason) == (expected, reason)
        told = [output.weight_version for output in seen[s.id] for _ in output.token_ids]
        assert told == versions[s.id]
        assert i in patients or all(output.steps == 1 for output in seen[s.id])


class Read:
    """Notes the texts that were read whole in the background, which emit nothing."""

    def __init__(self, kv: FakeKV) -> None:
        self.kv, self.texts = kv, list[list[int]]()

    def emitted(self, sequence: Sequence, emission: Emission, *_: object, decodes: bool) -> None:
        assert not emission.tokens

    def ended(self, sequence: Sequence, reason: str) -> None:
        if reason == "length":
            text = sequence.tokens.tolist()
            for position in range(len(text) - 1):
                assert self.kv.slot[self.kv.at(sequence, position)] == tuple(text[: position + 1])
            self.texts.append(text)


def background(n: int, text: list[int], read: Read) -> Sequence:
    made = sequence(1000 + n, text, 0, 0)
    made.background, made.trace = True, read
    return made


def test_background_sequences_leave_the_prefix_cache_unchanged() -> None:
    scheduler, kv = make(6)
    text = [*range(2 * PAGE)]
    scheduler.submit([sequence(0, text, 1, 0)])
    finish(scheduler, kv)
    cached = scheduler.pool.cached
    read = Read(kv)
    scheduler.submit([background(1, text, read), background(2, [*text, 5, 6, 7], read)])
    rows = 0
    while (batch := scheduler.next_batch()) is not None:
        assert not batch.owners and scheduler.gauges()["running"] == 0
        rows += sum(chunk.end - chunk.start for chunk in batch.chunks)
        assert scheduler.commit(batch, run(scheduler, batch, kv, random.Random(0))) == []
    assert rows == 2 * len(text) + 3 and len(read.texts) == 2
    assert scheduler.pool.cached == cached


def step(
    scheduler: Scheduler, kv: FakeKV, seen: dict[str, list[StepOutput]] | None = None
) -> Batch:
    batch = scheduler.next_batch()
    assert batch is not None
    outputs = scheduler.commit(batch, run(scheduler, batch, kv, random.Random(0)))
    collect(outputs, {} if seen is None else seen)
    scheduler.check()
    return batch


def finish(scheduler: Scheduler, kv: FakeKV) -> dict[str, list[StepOutput]]:
    seen: dict[str, list[StepOutput]] = {}
    while not scheduler.idle:
        step(scheduler, kv, seen)
    return seen


def tokens_of(outputs: list[StepOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def test_group_of_requests_computes_its_prompt_once() -> None:
    scheduler, kv = make(64, max_running=8, max_rows=64)
    prompt = list(range(17))
    scheduler.submit([sequence(i, prompt, 3, i) for i in range(6)])
    rows = 0
    seen: dict[str, list[StepOutput]] = {}
    while batch := scheduler.next_batch():
        rows += sum(w.end - w.start for w in batch.chunks if not w.sequence.output_len)
        collect(scheduler.commit(batch, run(scheduler, batch, kv, random.Random(0))), seen)
    assert rows == 17 + 5 * 1  # four full pages are shared, one row is left to each sibling
    assert sorted(outputs[0].cached_tokens for outputs in seen.values()) == [0] + [16] * 5


def test_owners_share_no_prefix_but_keyless_requests_share_all() -> None:
    scheduler, kv = make(64)
    scheduler.submit([sequence(0, list(range(9)), 2, 1, owner="a", salt="s")])
    finish(scheduler, kv)
    scheduler.submit(
        [
            sequence(1, list(range(9)), 2, 1, owner="b", salt="s"),
            sequence(2, list(range(9)), 2, 1, owner="a", salt="s"),
            sequence(3, list(range(9)), 2, 1, salt="s"),
        ]
    )
    seen = finish(scheduler, kv)
    assert [seen[f"r{i}"][0].cached_tokens for i in (1, 2, 3)] == [0, 8, 0]
    tokens = {tuple(tokens_of(seen[f"r{i}"])) for i in (1, 2, 3)}
    assert len(tokens) == 1, "sharing never changes a token"


def test_salt_separates_prefixes() -> None:
    scheduler, kv = make(64)
    scheduler.submit([sequence(0, list(range(9)), 2, 1, salt="a")])
    finish(scheduler, kv)
    scheduler.submit(
        [sequence(1, list(range(9)), 2, 1, salt="b"), sequence(2, list(range(9)), 2, 1, salt="a")]
    )
    seen = finish(scheduler, kv)
    assert seen["r1"][0].cached_tokens == 0 and seen["r2"][0].cached_tokens == 8


def test_flush_of_a_running_sequence_stops_sharing_without_delay() -> None:
    scheduler, kv = make(64, max_rows=8)
    prompt = list(range(13))
    scheduler.submit([sequence(0, prompt, 2, 1)])
    batch = scheduler.next_batch()
    assert batch is not None
    in_flight = run(scheduler, batch, kv, random.Random(0))
    scheduler.forget_prefixes()
    kv.flushes += 1
    scheduler.commit(batch, in_flight)
    scheduler.submit([sequence(1, prompt, 2, 1)])
    chunks = step(scheduler, kv).chunks
    assert [(chunk.sequence.id, chunk.start) for chunk in chunks] == [("r0", 8), ("r1", 0)]
    finish(scheduler, kv)
    kv.check_published(scheduler.pool)
    scheduler.submit([sequence(2, prompt, 2, 1)])
    assert finish(scheduler, kv)["r2"][0].cached_tokens == 12, (
        "what came after the flush serves others"
    )


def test_only_running_sequences_hold_kv() -> None:
    scheduler, kv = make(64)
    scheduler.submit([sequence(i, [1, 2, 3], 9, i) for i in range(2)])
    assert not scheduler.holds_kv, "nothing has begun"
    batch = scheduler.next_batch()
    assert batch is not None and scheduler.holds_kv
    scheduler.commit(batch, run(scheduler, batch, kv, random.Random(0)))
    scheduler.change_version("v2", "continue")
    scheduler.give_up_pages()
    assert not scheduler.holds_kv
    assert any(s.saved for s in scheduler._waiting), "a copy is the sequence's own"
    finish(scheduler, kv)
    assert not scheduler.holds_kv


def test_page_shortage_preempts_and_every_sequence_finishes() -> None:
    scheduler, kv = make(8, max_running=4)
    scheduler.submit([sequence(i, [i], 24, i) for i in range(4)])
    seen = finish(scheduler, kv)
    assert scheduler.preemptions > 0
    for i in range(4):
        assert tokens_of(seen[f"r{i}"]) == alone(sequence(i, [i], 24, i).request)[0]


def test_partly_read_prompt_restarts_under_the_new_version() -> None:
    scheduler, kv = make(16, max_rows=4)
    scheduler.submit([sequence(0, list(range(10)), 3, 0)])
    assert not step(scheduler, kv).chunks[0].samples
    scheduler.change_version("v2", "continue")
    batch = scheduler.next_batch()
    assert batch is not None and (batch.chunks[0].start, batch.weight_version) == (0, "v2")
    assert not batch.chunks[0].sequence.mixed_version


def test_recompute_drops_kv_saved_at_preemption() -> None:
    scheduler, kv = make(8, max_running=4)
    sequences = [sequence(i, [i], 24, i) for i in range(4)]
    scheduler.submit(sequences)
    seen: dict[str, list[StepOutput]] = {}

    step(scheduler, kv, seen)
    scheduler.change_version("v2", "continue")
    while not any(s.saved for s in sequences):
        step(scheduler, kv, seen)
        kv.check_versions(scheduler)
    scheduler.change_version("v3", "recompute")
    assert not any(s.saved or s.mixed_version for s in sequences)
    while not scheduler.idle:
        step(scheduler, kv, seen)
        kv.check_versions(scheduler)
    for s in sequences:
        assert tokens_of(seen[s.id]) == alone(s.request)[0]


def test_a_batch_is_admitted_whole_or_not_at_all() -> None:
    scheduler, _ = make(4)
    with pytest.raises(InvalidRequest, match="needs 40 positions, this server holds 16"):
        scheduler.submit([sequence(0, [1], 3, 0), sequence(1, [1] * 10, 30, 0)])
    assert scheduler.idle
    scheduler.submit([sequence(0, [1], 3, 0)])
    with pytest.raises(InvalidRequest, match="already in use"):
        scheduler.submit([sequence(0, [1], 3, 0)])


def test_repeated_sequence_id_is_one_sequence() -> None:
    scheduler, kv = make(pages=8)
    with pytest.raises(InvalidRequest, match="already in use"):
        scheduler.submit([sequence(0, [1, 2, 3], 5, 1), sequence(0, [4], 5, 2)])
    scheduler.check()
    assert scheduler.idle
    scheduler.submit([sequence(i, [1, 2, 3], 5, i) for i in range(2)])
    step(scheduler, kv)
    ended = scheduler.abort(["r0", "unknown", "r0"])
    scheduler.check()
    assert [output.id for output in ended] == ["r0"] and scheduler.abort(["r0"]) == []
    assert [output.id for output in scheduler.abort(["r1", "r1"], all=True)] == ["r1"]
    assert scheduler.idle


def test_skipped_one_token_prompt_is_scored_once() -> None:
    scheduler, _ = make(24)
    scheduler.submit([sequence(0, [1], 4, 0)])
    said: list[StepOutput] = []
    for tokens in ([], [], [5]):
        batch = scheduler.next_batch()
        assert batch is not None
        scheduler.launched(batch, 0)
        emission = Emission(tokens=tokens, logprobs=[-1.0] * len(tokens), prompt_logprobs=[None])
        said += scheduler.commit(batch, [emission])
        scheduler.check()
    assert [(output.token_ids, output.prompt_logprobs) for output in said] == [([5], [None])]


def test_empty_abort_ends_no_sequence_and_abort_all_is_explicit() -> None:
    scheduler, _ = make(24)
    scheduler.submit([sequence(i, [1, 2, 3], 4, i) for i in range(3)])
    assert scheduler.abort([]) == [] and not scheduler.idle
    assert {o.id for o in scheduler.abort([], "abort", all=True)} == {"r0", "r1", "r2"}
    assert scheduler.idle


def test_deadlines_end_running_and_waiting_sequences() -> None:
    now = 0.0
    scheduler, _ = make(8, max_running=1, clock=lambda: now)
    dated = [sequence(i, [1 + i], 9, 0, deadline_s=5.0) for i in range(2)]
    scheduler.submit([*dated, sequence(2, [3], 9, 0)])
    scheduler.next_batch()
    assert scheduler.expire() == []
    now = 5.0
    ended = scheduler.expire()
    assert [(o.id, o.finish_reason, o.error and o.error[0]) for o in ended] == [
        ("r0", "error", "deadline_exceeded"),
        ("r1", "error", "deadline_exceeded"),
    ]
    scheduler.check()
    assert scheduler.gauges()["waiting"] == 1


def test_first_output_reports_how_long_a_sequence_waited() -> None:
    now = 0.0
    scheduler, _ = make(32, max_running=1, clock=lambda: now)
    scheduler.submit([sequence(0, [1], 2, 0), sequence(1, [2], 2, 0)])
    waited: dict[str, list[float]] = {"r0": [], "r1": []}
    while batch := scheduler.next_batch():
        now += 1.0
        for output in scheduler.commit(batch, [Emission([3], [0.0]) for _ in batch.chunks]):
            waited[output.id].append(output.queued_s)
    assert waited == {"r0": [0.0, 0.0], "r1": [2.0, 0.0]}


def test_paused_scheduler_keeps_running_and_waiting_sequences() -> None:
    gate = StepGate()
    scheduler, kv = make(16, gate=gate)
    scheduler.submit([sequence(0, [1, 2, 3], 4, 0)])
    gate.hold(Reason.PAUSED)
    assert scheduler.next_batch() is None and not scheduler.idle
    gate.release(Reason.PAUSED)
    assert finish(scheduler, kv)["r0"][-1].finish_reason in ("stop", "length")
