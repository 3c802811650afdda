"""The sequences that are open: how a large batch goes to the engine."""

import asyncio
from typing import Any

import msgspec
import pytest

from tests.frontend.fake_engine import INFO
from tests.waiting import in_loop
from tlt_server.errors import EngineFailed, QueueFull
from tlt_server.frontend.link.admission import Admission
from tlt_server.frontend.link.replica import Replica, Replicas
from tlt_server.frontend.link.sequences import OpenSequences
from tlt_server.frontend.link.submission import PIECE, SLICE_IDS, SLICE_REQUESTS, Chores
from tlt_server.metrics import Metrics
from tlt_server.wire.commands import Command, Submit
from tlt_server.wire.records import GenerateRequest, Sampling, StepOutput, last_output


def requests(count: int, ids: int) -> list[GenerateRequest]:
    token_ids, sampling = [1] * ids, Sampling(max_tokens=1)
    return [
        GenerateRequest(id=f"a-{i}.0", token_ids=token_ids, sampling=sampling, seed=i)
        for i in range(count)
    ]


class Sent(list[Command]):
    """A link that keeps what it was given."""

    def __init__(self) -> None:
        self.replica = Replica()
        self.begin()

    def begin(self) -> None:
        self.replica.connect(self)
        self.replica.ready(INFO)

    def send(self, command: Command) -> bool:
        self.append(command)
        return True


def opened(
    admission: Admission | None = None, metrics: Metrics | None = None
) -> tuple[OpenSequences, Sent]:
    sent = Sent()
    if admission is None:
        admission = Admission(max_queue=10**6, max_queue_tokens=10**9, max_page_forecast=1e9)
    sequences = OpenSequences(admission, metrics or Metrics(), Replicas(sent.replica))
    sent.replica.queue = sequences.where.queue(sent.replica)
    return sequences, sent


def submit(sequences: OpenSequences, batch: list[GenerateRequest], *, resumes: bool = False) -> Any:
    return sequences.submit(batch, deadline_s=None, resumes=resumes, accepted=False)


@in_loop
async def test_other_requests_are_sent_between_slices_of_a_large_batch() -> None:
    for count, ids in ((1000, 3), (40, 8000), (3, 2 * SLICE_IDS)):
        sequences, sent = opened()
        batch = requests(count, ids)
        submit(sequences, batch)
        assert len(sent) == 1
        one = GenerateRequest(id="b", token_ids=[1], sampling=Sampling(), seed=1)
        submit(sequences, [one])
        for _ in range(100):
            await asyncio.sleep(0)
        *slices, last = [command.requests for command in sent if isinstance(command, Submit)]
        assert last == [one]
        assert [request for slice in slices for request in slice] == batch
        for slice in slices:
            assert len(slice) <= SLICE_REQUESTS
            assert len(slice) == 1 or sum(len(r.token_ids) for r in slice) <= SLICE_IDS


@in_loop
async def test_sequence_ended_between_two_slices_is_not_sent() -> None:
    sequences, sent = opened()
    batch = requests(SLICE_REQUESTS + 2, 1)
    submission = submit(sequences, batch)
    sequences.abort([batch[-1].id], "abort")
    await asyncio.sleep(0.01)
    assert batch[-1].id not in submission.open
    given = [r.id for command in sent if isinstance(command, Submit) for r in command.requests]
    assert given == [r.id for r in batch[:-1]]
    submission.close()
    await asyncio.sleep(0.01)
    sent.clear()
    submit(sequences, batch).close()
    await asyncio.sleep(0.01)
    assert [type(command).__name__ for command in sent] == ["Submit", "Abort"]


@pytest.mark.parametrize("end", ["die", "expire", "abort", "leave"])
@in_loop
async def test_thousands_of_sequences_end_in_several_loop_passes(end: str) -> None:
    sequences, sent = opened()
    submission = submit(sequences, requests(4 * PIECE, 1))
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(sequences) == 4 * PIECE and not sequences.held_ids
    match end:
        case "die":
            sequences.died(sent.replica, [], EngineFailed("it is gone"))
        case "expire":
            sequences.expire(submission)
        case "abort":
            sequences.died(sent.replica, [], EngineFailed("it is gone"))
            sequences.resume()
            sequences.abort(sequences.ids, "abort")
        case "leave":
            submission.close()
    assert len(sequences) == 3 * PIECE
    await asyncio.sleep(0)
    assert len(sequences) == 2 * PIECE
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(sequences) == 0 and sequences.idle.is_set()
    if end != "leave":
        outputs = [o for few, _ in [each async for each in submission.slices(size, 1)] for o in few]
        assert {output.id for output in outputs} == {r.id for r in requests(4 * PIECE, 1)}
        assert all(output.finish_reason == "error" for output in outputs)


def size(output: StepOutput) -> int:
    return 1


@in_loop
async def test_resubmission_runs_in_slices_after_the_suspects() -> None:
    sequences, sent = opened()
    batch = [
        *requests(2 * PIECE, 1),
        GenerateRequest(id="a", token_ids=[2], sampling=Sampling(), seed=1),
    ]
    submission = submit(sequences, batch, resumes=True)
    await asyncio.sleep(0.01)
    first = batch[-1].id
    sequences.dispatch([StepOutput(id=first, token_ids=[7, 8], logprobs=[-1.0, -1.0])])
    sequences.died(sent.replica, [first], EngineFailed("it is gone"))
    sent.clear()
    sequences.resume()
    submit(sequences, [GenerateRequest(id="b", token_ids=[1], sampling=Sampling(), seed=1)])
    await asyncio.sleep(0.01)
    [tried] = sent
    assert [(r.id, r.generated) for r in tried.requests] == [(first, [7, 8])]  # type: ignore[union-attr]
    sequences.dispatch([StepOutput(id=first, token_ids=[9], logprobs=[-1.0])])
    await asyncio.sleep(0.01)
    *others, last = [c.requests for c in sent[1:] if isinstance(c, Submit)]
    assert [r.id for few in others for r in few] == [r.id for r in batch[:-1]]
    assert [r.id for r in last] == ["b"]
    submission.close()


@in_loop
async def test_tokens_of_an_earlier_server_reach_every_engine() -> None:
    sequences, sent = opened()
    [fresh] = requests(1, 1)
    request = msgspec.structs.replace(fresh, generated=[5, 6])
    submission = submit(sequences, [request], resumes=True)
    for token in (7, 8):
        sequences.dispatch([StepOutput(id=request.id, token_ids=[token], logprobs=[-1.0])])
        sequences.died(sent.replica, [], EngineFailed("it is gone"))
        sequences.resume()
    submits = [command for command in sent if isinstance(command, Submit)]
    assert [r.generated for few in submits for r in few.requests] == [
        [5, 6],
        [5, 6, 7],
        [5, 6, 7, 8],
    ]
    submission.close()


@in_loop
async def test_second_crash_during_resubmission_sends_no_request_twice() -> None:
    sequences, sent = opened()
    batch = requests(3 * PIECE, 1)
    submission = submit(sequences, batch, resumes=True)
    sequences.died(sent.replica, [], EngineFailed("it is gone"))
    sequences.resume()
    await asyncio.sleep(0)
    sequences.died(sent.replica, [], EngineFailed("it is gone again"))
    sent.replica.died("it is gone again", 0.0, 0.0)
    await asyncio.sleep(0.01)
    sent.clear()
    sent.begin()
    sequences.resume()
    await asyncio.sleep(0.01)
    given = [r.id for command in sent if isinstance(command, Submit) for r in command.requests]
    assert given == [r.id for r in batch]
    submission.close()


@in_loop
async def test_many_outputs_are_delivered_in_small_slices() -> None:
    sequences, sent = opened()
    batch = requests(3, 1)
    submission = submit(sequences, batch)
    for token in range(10):
        sequences.dispatch(StepOutput(id=r.id, token_ids=[token], logprobs=[-1.0]) for r in batch)
    sequences.abort([r.id for r in batch], "abort")
    sequences.end_all(EngineFailed("it is gone"))
    slices = [few async for few, _ in submission.slices(size, 4)]
    assert [len(few) for few in slices] == [4] * 8 + [1]
    outputs = [output for few in slices for output in few]
    assert [output.id for output in outputs] == [r.id for r in batch for _ in range(11)]
    assert [o.token_ids for o in outputs[:11]] == [[token] for token in range(10)] + [[]]


@in_loop
async def test_wait_for_the_next_engine_counts_between_two_tokens() -> None:
    metrics = Metrics()
    admission = Admission(max_queue=10, max_queue_tokens=100, max_page_forecast=1e9)
    sequences, sent = opened(admission, metrics)
    [request] = batch = requests(1, 1)
    submission = sequences.submit(batch, deadline_s=None, resumes=True, accepted=False)
    for tokens in ([1], [2, 3]):
        sequences.dispatch(
            [StepOutput(id=request.id, token_ids=tokens, logprobs=[-1.0] * len(tokens))]
        )
    sequences.died(sent.replica, [request.id], EngineFailed("it is gone"))
    await asyncio.sleep(0.02)
    sequences.resume()
    await asyncio.sleep(0.02)
    sequences.dispatch([StepOutput(id=request.id, token_ids=[4, 5], logprobs=[-1.0, -1.0])])
    observed = {
        sample.name: sample.value
        for family in metrics.sequences.inter_token_s.collect()
        for sample in family.samples
    }
    assert observed["tlt_inter_token_seconds_count"] == 1
    assert observed["tlt_inter_token_seconds_sum"] >= 0.01
    submission.close()


@pytest.mark.parametrize(("others_tokens", "blamed"), [(0, ""), (1, "a")])
@in_loop
async def test_suspected_key_is_blamed_after_other_keys_ran_safely(
    others_tokens: int, blamed: str
) -> None:
    def asked(id: str, owner: str) -> GenerateRequest:
        return GenerateRequest(
            id=id, token_ids=[ord(owner)], sampling=Sampling(max_tokens=9), seed=1, owner=owner
        )

    sequences, sent = opened()
    submit(sequences, [asked("a1", "a")])
    sequences.died(sent.replica, ["a1"], EngineFailed("it is gone"))
    await asyncio.sleep(0.01)
    submit(sequences, [asked("b1", "b")])
    for token in range(others_tokens):
        sequences.dispatch([StepOutput(id="b1", token_ids=[token], logprobs=[-1.0])])
    submit(sequences, [asked("a2", "a")])
    await asyncio.sleep(0.01)
    assert sequences.alone(["b1", "a2"]) == blamed
    assert sequences.alone(["a2"]) == "a" and sequences.alone(["b1"]) == "b"
    sequences.end_all(EngineFailed("the test is over"))


@pytest.mark.parametrize("end", ["leave", "expire"])
@in_loop
async def test_abandoned_sequences_count_until_the_engine_ends_them(end: str) -> None:
    admission = Admission(max_queue=10, max_queue_tokens=10**9, max_page_forecast=1e9)
    sequences, sent = opened(admission)

    def leave(batch: list[GenerateRequest]) -> None:
        submission = submit(sequences, batch)
        if end == "leave":
            submission.close()
        else:
            sequences.expire(submission)

    first, more = requests(10, 1), requests(12, 1)[10:]
    leave(first)
    assert len(sequences) == 0 and sequences.idle.is_set() and len(admission) == 10
    with pytest.raises(QueueFull, match="max_queue"):
        submit(sequences, more)
    # The engine may have ended one before it read the abort; of one it says so twice.
    for id, reason in (("a-0.0", "stop"), ("a-1.0", "abort"), ("a-1.0", "abort")):
        sequences.dispatch([last_output(id, reason)])
    assert len(admission) == 8
    leave(more)
    assert len(admission) == 10
    sequences.died(sent.replica, ["a-3.0"], EngineFailed("it is gone"))
    await asyncio.sleep(0.01)
    assert len(admission) == 0
    admission.check()


@in_loop
async def test_failed_background_task_delays_no_other_and_is_not_rerun() -> None:
    failures: list[str] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: failures.append(str(context["exception"])))
    chores, done = Chores(), list[int]()

    def fail() -> None:
        raise RuntimeError("the end")

    with pytest.raises(RuntimeError, match="the end"):
        chores.add([1], done.extend, fail)
    chores.add(range(PIECE + 1), lambda few: None, fail)
    chores.add([2], done.extend)
    for _ in range(10):
        await asyncio.sleep(0)
    assert (done, failures) == ([1, 2], ["the end"])
