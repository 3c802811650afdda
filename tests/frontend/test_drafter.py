"""`/drafter`: what is drafted with and what is recorded; `/drafter/samples` hands it out, and
refuses what it cannot.
"""

import asyncio
import json
import shutil
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.frontend.live_server import LiveServer, live_server
from tests.unit.recorded_samples import VOCAB, sample
from tests.waiting import until
from tlt_client import Client
from tlt_client.channels.checkpoint import CALIBRATION, SINGLE
from tlt_client.errors import Conflict, InvalidRequest, NotFound
from tlt_server.__main__ import main
from tlt_server.demo.workload import TARGET
from tlt_server.errors import Unavailable
from tlt_server.frontend.dialects.drafter import accepted_at_depth
from tlt_server.frontend.link.trainer import TrainerLink
from tlt_server.metrics import Metrics
from tlt_server.samples.identity import identity_of
from tlt_server.samples.inbox import DIRECTORY, MAX_FILES, PARTIAL, Inbox
from tlt_server.samples.ring import RingProducer
from tlt_server.samples.sample import encode_sample
from tlt_server.samples.segments import (
    Refusals,
    SegmentHeader,
    header_bytes,
    read_segment,
    recorded,
)
from tlt_server.training import RING, SAMPLES, WORK
from tlt_server.wire.kept import WEIGHTS
from tlt_server.wire.records import Cycle, StepContext, Strategy
from tlt_server.wire.training import Judged, SpotReport, candidate_directory


def cycle(depth: int, accepted: tuple[int, ...], speculable: int | None = None) -> Cycle:
    decoding = len(accepted)
    context = StepContext(decoding, 0, 10.0, decoding if speculable is None else speculable)
    strategy = Strategy("history", depth, 1, depth + 1)
    return Cycle(context=context, strategy=strategy, rows=8, accepted=accepted, drafted=depth)


@pytest.fixture(scope="module")
def recorded_model(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, whose config.json also has a vocabulary."""
    copy = tmp_path_factory.mktemp("recorded") / "model"
    shutil.copytree(model, copy)
    config = json.loads((copy / "config.json").read_bytes())
    (copy / "config.json").write_text(json.dumps(config | {"vocab_size": VOCAB}))
    return copy


@pytest.fixture(scope="module")
def recording(
    recorded_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveServer]:
    """A server with a trainer process, which has taken five sequences and refused junk."""
    state = tmp_path_factory.mktemp("state")
    with live_server(
        recorded_model,
        engine={"drafter": "history"},
        drafter="history",
        drafter_training="idle",
        state_dir=state,
    ) as server:
        ring = RingProducer(server.directory / RING)
        for i in range(5):
            ring.offer(encode_sample(sample(i, version=f"v{i // 3}")))
        ring.offer(b"junk")
        with Client(server.url) as client:
            until(lambda: client.drafter()["buffer"]["sequences"] == 5)
        yield server


def test_a_server_without_recording_shows_an_empty_state(
    client: Client, server: LiveServer
) -> None:
    assert client.drafter() == {
        "target_version": "v0",
        "drafters": [],
        "training": "off",
        "trainer": None,
        "buffer": None,
    }
    reply = httpx.get(f"{server.url}/drafter/samples")
    assert reply.status_code == 409
    assert "--drafter-training idle and --state-dir" in reply.json()["error"]["message"]


def test_the_buffer_is_shown_with_the_reasons_of_refusals(recording: LiveServer) -> None:
    with Client(recording.url) as client:
        until(lambda: client.drafter()["buffer"]["refused"] == 1)
        state = client.drafter()
    trainer = state["trainer"]
    assert (state["training"], trainer["process"], trainer["error"]) == ("idle", "running", "")
    assert (trainer["state"], trainer["steps"], trainer["candidate"]) == ("idle", 0, None)
    buffer = state["buffer"]
    assert buffer["tokens"] == 5 * 12 and buffer["bytes"] > 5 * 48
    assert buffer["tokens_by_version"] == {"v0": 3 * 8, "v1": 2 * 8}
    assert "no sequence" in buffer["refusals"][0]


def test_acceptance_counts_only_steps_where_all_requests_draft(recording: LiveServer) -> None:
    drafted = recording.client.replica.drafted
    recording.call(
        lambda: drafted.extend([cycle(3, (3, 1)), cycle(3, (0, 0), 1), cycle(1, (1, 0))])
    )
    with Client(recording.url) as client:
        [served] = client.drafter()["drafters"]
    assert served == {
        "name": "history",
        "architecture": None,
        "weight_version": None,
        "trained_for": None,
        "resting": False,
        "steps": 2,
        "accept_length": 1 + 5 / 4,
        "accepted_at_depth": [3 / 4, 1 / 2, 1 / 2],
    }
    recording.call(drafted.clear)


def test_branches_may_reach_deeper_than_the_strategy() -> None:
    assert accepted_at_depth([cycle(2, (5, 1, 0, 2))]) == [3 / 4, 2 / 4]
    assert accepted_at_depth([]) == []


def test_samples_are_returned_in_bounded_parts(
    recording: LiveServer, recorded_model: Path, tmp_path: Path
) -> None:
    header = SegmentHeader.of(identity_of(recorded_model), VOCAB)
    after, left, read = 0, 1, []
    with Client(recording.url) as client:
        while left:
            content, after, left = client.drafter_samples(after, limit=2)
            (tmp_path / "part").write_bytes(content)
            entries = [*read_segment(tmp_path / "part", header, Refusals())]
            assert len(entries) == min(2, 5 - len(read))
            read += entries
        assert client.drafter_samples(after)[1:] == (after, 0)
    assert [encode_sample(entry.sample) for entry in read] == [
        encode_sample(sample(i, version=f"v{i // 3}")) for i in range(5)
    ]


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("after=-1", "after is '-1'"),
        ("after=nan", "from 0 to"),
        ("after=", "after is ''"),
        ("after=1e3", "whole number"),
        ("after=%C2%B2", "whole number"),
        ("after=9223372036854775808", "from 0 to 9223372036854775807"),
        (f"after={'9' * 5000}", "whole number"),
        ("after=../../etc/passwd", "whole number"),
        ("after=6", "the newest sequence is 5"),
        ("limit=0", "from 1 to 4096"),
        ("limit=4097", "from 1 to 4096"),
    ],
)
def test_malformed_cursors_and_limits_are_refused(
    recording: LiveServer, query: str, said: str
) -> None:
    reply = httpx.get(f"{recording.url}/drafter/samples?{query}")
    assert reply.status_code == 400 and said in reply.json()["error"]["message"], reply.text
    assert len(reply.text) < 1000


@pytest.mark.parametrize(
    ("for_s", "said"),
    [
        ("-1", "for_s"),
        ("86401", "for_s"),
        ("1e999", "number"),
        ("NaN", "JSON"),
        ('"60"', "for_s"),
        ("true", "for_s"),
    ],
)
def test_drafter_pause_with_an_invalid_duration_is_refused(
    server: LiveServer, for_s: str, said: str
) -> None:
    reply = httpx.post(f"{server.url}/drafter/pause", content=f'{{"for_s": {for_s}}}')
    assert reply.status_code == 400 and said in reply.json()["error"]["message"], reply.text


def test_server_without_sample_files_returns_no_samples(recorded_model: Path) -> None:
    with live_server(recorded_model, drafter_training="idle") as server:
        reply = httpx.get(f"{server.url}/drafter/samples")
        state = httpx.get(f"{server.url}/drafter").json()
    assert reply.status_code == 409 and "--state-dir" in reply.json()["error"]["message"]
    assert state["buffer"]["directory"] is None and state["trainer"]["state"] == "idle"


@pytest.mark.parametrize(
    ("command", "error"),
    [
        ("import sys; sys.exit(3)", "exit status 3"),
        ("import os; os.kill(os.getpid(), 9)", "ended by signal 9"),
        ("", "not started: No such file or directory"),
    ],
)
def test_an_ended_trainer_is_shown_with_the_reason(command: str, error: str) -> None:
    async def launch() -> Process:
        program = sys.executable if command else "/nothing/here"
        return await asyncio.create_subprocess_exec(program, "-c", command, stdout=PIPE)

    async def run() -> TrainerLink:
        link = TrainerLink(launch, Metrics().samples, None)
        assert (link.phase, link.error, link.restarts) == ("starting", "", 0)
        running = asyncio.create_task(link.run())
        while link.restarts < 1:
            assert link.phase != "running"
            await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.wait({running})
        return link

    link = asyncio.run(run())
    assert link.error == error


def test_drafter_command_prints_servers_with_and_without_drafter(
    recording: LiveServer, client: Client, server: LiveServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["drafter", "status", "--url", recording.url]) == 0
    said = capsys.readouterr().out
    for part in ("drafter history", "not known", "idle", "output tokens of v1", "offered"):
        assert part in said, said
    assert main(["drafter", "status", "--url", server.url]) == 0
    assert "no drafter is loaded" in capsys.readouterr().out
    assert main(["drafter", "status", "--url", "http://127.0.0.1:1"]) == 1
    assert "cannot be reached" in capsys.readouterr().err


def test_samples_of_a_peer_server_are_accepted_once(
    recording: LiveServer, recorded_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    state = tmp_path_factory.mktemp("other")
    settings = {"drafter": "history", "drafter_training": "idle", "state_dir": state}
    with (
        live_server(recorded_model, engine={"drafter": "history"}, **settings) as server,
        Client(recording.url) as source,
        Client(server.url) as client,
    ):
        content = source.drafter_samples().content
        for _ in range(2):
            taken = client.add_drafter_samples(content)
            assert taken == {"sequences": 5, "refused": 0, "refusals": []}
        until(lambda: client.drafter()["buffer"]["sequences"] == 5)
        inbox = state / SAMPLES / DIRECTORY
        until(lambda: not [*inbox.iterdir()])
        assert client.drafter()["buffer"]["sequences"] == 5
        for body, said in (
            (b"junk", "the file is no segment file"),
            (content[:90], "the file, frame 0"),
            (b"", "no segment file"),
        ):
            with pytest.raises(InvalidRequest, match=said):
                client.add_drafter_samples(body)
        assert not [*inbox.iterdir()]


def test_full_sample_inbox_is_refused(tmp_path: Path) -> None:
    inbox = Inbox(tmp_path / "inbox")
    header = SegmentHeader(1, VOCAB, "m", "")
    content = header_bytes(header) + recorded(1, sample(1))[1]
    with ThreadPoolExecutor(4) as threads:
        futures = [threads.submit(inbox.put, content, header) for _ in range(4 * MAX_FILES)]
    refused = [future.exception() for future in futures if future.exception() is not None]
    assert len(refused) == 3 * MAX_FILES and {type(error) for error in refused} == {Unavailable}
    assert len([*inbox.directory.iterdir()]) == MAX_FILES
    with pytest.raises(Unavailable, match="still wait"):
        inbox.check_room()
    assert [entry.sample for entry in inbox.take(header, Refusals(), 100)] == [sample(1)]
    inbox.check_room()
    (inbox.directory / f"crashed{PARTIAL}").write_bytes(content[:90])
    inbox.clear()
    assert len([*inbox.directory.iterdir()]) == MAX_FILES - 1


def test_drafter_without_weights_has_no_files_to_return(recording: LiveServer) -> None:
    with Client(recording.url) as client, pytest.raises(Conflict, match="no drafter with weights"):
        client.drafter_files()


@pytest.fixture
def candidate(
    recorded_model: Path, tmp_path: Path
) -> Iterator[tuple[LiveServer, Callable[[Judged], Path]]]:
    """A server with a trainer process, and what reports a candidate to it in that one's place."""
    settings = {"drafter_training": "idle", "drafter_feature_mb": 1, "state_dir": tmp_path}
    (tmp_path / WEIGHTS).mkdir()
    with live_server(
        recorded_model,
        engine={"drafter": "eagle"},
        drafter=str(TARGET.parent / "drafter"),
        **settings,
    ) as server:
        link = server.service.trainer
        assert link is not None
        until(lambda: link.spot.interval_tokens > 0)  # the process has reported

        def judged(found: Judged) -> Path:
            server.call(lambda: setattr(link, "spot", SpotReport(candidate=found)))
            place = server.directory / WORK / candidate_directory(found.candidate)
            place.mkdir(parents=True)
            return place

        yield server, judged


def judged(number: int, outcome: str) -> Judged:
    version = f"drafter-v0-{number}-0123abcd"
    return Judged(
        candidate=number,
        version=version,
        target_version="v0",
        drafter_version="d0",
        outcome=outcome,
        gain=0.1,
        ms_per_token=1.5,
        ms_per_token_before=1.8,
    )


def write_candidate(place: Path, tensors: bytes) -> None:
    (place / SINGLE).write_bytes(tensors)
    (place / CALIBRATION).write_bytes(b"a table")
    (place / "config.json").write_bytes(b"{}")


def test_candidate_is_returned_with_its_trial(
    candidate: tuple[LiveServer, Callable[[Judged], Path]], tmp_path: Path
) -> None:
    server, report = candidate
    with Client(server.url) as client:
        with pytest.raises(NotFound, match="no candidate since it started; POST /drafter/train"):
            client.drafter_files("candidate")
        tensors = bytes(range(256)) * 2**15 + b"more than one slice"
        write_candidate(report(judged(1, "no_gain")), tensors)
        listed = client.fetch_drafter(tmp_path / "here", of="candidate")
        assert listed["version"] == "drafter-v0-1-0123abcd" and listed["target_version"] == "v0"
        trial = listed["candidate"]
        assert trial == client.drafter()["trainer"]["candidate"]
        assert (trial["outcome"], trial["target_version"], trial["gain"]) == ("no_gain", "v0", 0.1)
        assert (tmp_path / "here" / SINGLE).read_bytes() == tensors
        assert sorted(path.name for path in (tmp_path / "here").iterdir()) == [CALIBRATION, SINGLE]
        for name in ("config.json", "../candidate-1/model.safetensors"):
            with pytest.raises(NotFound):
                client.drafter_file(listed["version"], name, of="candidate")
        with pytest.raises(InvalidRequest, match="of is 'all'; it must be one of live, candidate"):
            client.drafter_files("all")  # type: ignore[arg-type]


def test_the_command_prints_a_candidates_gain_in_milliseconds(
    candidate: tuple[LiveServer, Callable[[Judged], Path]], capsys: pytest.CaptureFixture[str]
) -> None:
    server, report = candidate
    report(judged(1, "no_gain"))
    assert main(["drafter", "status", "--url", server.url]) == 0
    said = [line.strip(" │") for line in capsys.readouterr().out.splitlines()]
    (token,) = [line for line in said if line.startswith("replayed ms per token")]
    assert token.endswith("1.500, of the drafter in force 1.800")
    (cycle,) = [line for line in said if line.startswith("replayed ms per cycle")]
    assert cycle.endswith("not known")


def test_a_replaced_candidate_is_reported_as_such(
    candidate: tuple[LiveServer, Callable[[Judged], Path]],
) -> None:
    server, report = candidate
    with Client(server.url) as client:
        before = report(judged(1, "worse"))
        write_candidate(before, b"one")
        version = client.drafter_files("candidate")["version"]
        (before / CALIBRATION).unlink()  # as the next one is about to be written
        for ask in (
            lambda: client.drafter_files("candidate"),
            lambda: client.drafter_file(version, SINGLE, of="candidate"),
        ):
            with pytest.raises(Conflict, match="are removed, as the next one is being judged"):
                ask()
        write_candidate(report(judged(2, "adopted")), b"two")
        with pytest.raises(Conflict, match="is not the last candidate any more"):
            client.drafter_file(version, SINGLE, of="candidate")
        with pytest.raises(Conflict, match="is not live any more"):
            client.drafter_file(version, SINGLE)


def test_a_server_without_a_trainer_has_no_candidate(recording: LiveServer, client: Client) -> None:
    with pytest.raises(Conflict, match="drafter_training is off"):
        client.drafter_files("candidate")
    with Client(recording.url) as other, pytest.raises(Conflict, match="without a network"):
        other.drafter_files("candidate")
