"""The sequences that are open: how a large batch goes to the engine."""

import asyncio
from typing import Any

from tlt_server.commands import Command, Submit
from tlt_server.frontend.link.admission import Admission
from tlt_server.frontend.link.sequences import SLICE_IDS, SLICE_REQUESTS, OpenSequences
from tlt_server.metrics import Metrics
from tlt_server.records import GenerateRequest, Sampling


def requests(count: int, ids: int) -> list[GenerateRequest]:
    token_ids, sampling = [1] * ids, Sampling(max_tokens=1)
    return [
        GenerateRequest(id=f"a-{i}.0", token_ids=token_ids, sampling=sampling, seed=i)
        for i in range(count)
    ]


def opened() -> tuple[OpenSequences, list[Command]]:
    sent: list[Command] = []

    def send(command: Command) -> bool:
        sent.append(command)
        return True

    admission = Admission(max_queue=10**6, max_queue_tokens=10**9, max_page_forecast=1e9)
    return OpenSequences(admission, Metrics(), send), sent


def submit(sequences: OpenSequences, batch: list[GenerateRequest]) -> Any:
    return sequences.submit(batch, deadline_s=None, resume=None, accepted=False)


def test_a_large_batch_goes_in_slices_with_other_requests_in_between() -> None:
    async def main() -> None:
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

    asyncio.run(main())


def test_what_ends_between_two_slices_is_not_sent() -> None:
    async def main() -> None:
        sequences, sent = opened()
        batch = requests(SLICE_REQUESTS + 2, 1)
        submission = submit(sequences, batch)
        sequences.abort([batch[-1].id], "abort")
        assert batch[-1].id not in submission.open
        await asyncio.sleep(0.01)
        assert [r.id for r in sent[-1].requests] == [batch[-2].id]  # type: ignore[union-attr]
        submission.close()
        sent.clear()
        submit(sequences, batch).close()
        await asyncio.sleep(0.01)
        assert [type(command).__name__ for command in sent] == ["Submit", "Abort"]

    asyncio.run(main())
