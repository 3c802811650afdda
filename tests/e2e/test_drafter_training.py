"""Sequences that a server keeps to train its drafter: those that may be kept, over the death of the
trainer process, with the same tokens.
"""

import os
import re
import signal
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.conftest import DRAFTING
from tests.e2e.test_lifecycle import QUESTION
from tests.processes import trainer
from tests.waiting import until
from tlt_client import Client
from tlt_server.demo.server import ServerProcess
from tlt_server.demo.workload import TARGET
from tlt_server.samples.identity import identity_of, vocabulary_of
from tlt_server.samples.segments import SegmentHeader, read_segment
from tlt_server.trainer.recording.buffer import BufferBounds, SampleBuffer

ITEM = {"messages": QUESTION, "seed": 11, "n": 3, "sampling": {"max_tokens": 40}}


def figures(client: Client) -> dict[str, float]:
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(client.metrics())
        for sample in family.samples
    }


def kept(client: Client, count: int) -> None:
    until(lambda: figures(client)["tlt_drafter_buffer_sequences"] == count)


def test_a_recording_server_gives_the_same_tokens(client: Client, tmp_path: Path) -> None:
    expected = client.generate([ITEM]).results[0].choices
    flags = ("--drafter-training", "idle", "--state-dir", str(tmp_path), "--kv-memory-mb", "64")
    flags += ("--drafter-feature-mb", "64")
    lines: list[str] = []
    with (
        ServerProcess(*DRAFTING, *flags, on_line=lines.append) as server,
        Client(server.url, timeout_s=60) as own,
    ):
        until(lambda: any("keeps finished sequences" in line for line in lines))
        room = "4096 bytes a token, room for 16384 on their way .* 16384 held"
        until(lambda: any(re.search(room, line) for line in lines))
        found = own.generate([ITEM]).results[0].choices
        assert [c.token_ids for c in found] == [c.token_ids for c in expected]
        assert [c.logprobs for c in found] == [c.logprobs for c in expected]
        own.generate([{**ITEM, "train": False}])
        for path, body in (
            ("/v1/completions", {"prompt": "1+1=", "max_tokens": 4}),
            ("/v1/chat/completions", {"messages": QUESTION, "max_tokens": 4}),
            ("/generate", {"text": "1+1=", "sampling_params": {"max_new_tokens": 4}}),
            ("/inference/v1/generate", {"token_ids": [1, 2], "sampling_params": {"max_tokens": 4}}),
        ):
            answer = httpx.post(server.url + path, json={**body, "train": False}, timeout=60)
            assert answer.status_code == 200, (path, answer.text)
        httpx.get(f"{server.url}/health_generate", timeout=60)
        kept(own, 3)
        until(lambda: figures(own)["tlt_drafter_feature_tokens"] > 0)
        os.kill(trainer(server.process.pid), signal.SIGKILL)
        until(lambda: figures(own)["tlt_trainer_restarts_total"] == 1)
        found = own.generate([ITEM]).results[0].choices
        assert [c.token_ids for c in found] == [c.token_ids for c in expected]
        kept(own, 6)
        until(lambda: figures(own)["tlt_drafter_features_captured_total"] == 6)
        seen = figures(own)
        assert seen["tlt_drafter_samples_offered_total"] == 6
        assert seen["tlt_drafter_samples_dropped_total"] == 0
        assert seen["tlt_drafter_samples_refused_total"] == 0
        assert seen["tlt_drafter_features_dropped_total"] == 0
        state, handed = own.drafter(), own.drafter_samples()
        assert (state["trainer"]["process"], state["trainer"]["restarts"]) == ("running", 1)
        assert state["trainer"]["error"] == "ended by signal 9" and state["training"] == "idle"
        assert [drafter["name"] for drafter in state["drafters"]] == ["eagle", "history"]
        assert state["drafters"][0]["architecture"] == "LlamaForCausalLMEagle3"
        assert state["buffer"]["sequences"] == 6 and handed[1:] == (6, 0)
        own.generate([{**ITEM, "n": 1}])  # taken from the ring as the server stops
    header = SegmentHeader.of(identity_of(TARGET), vocabulary_of(TARGET))
    buffer = SampleBuffer(tmp_path / "samples", header, BufferBounds(10**6, 10**8))
    assert not buffer.refusals.count
    (tmp_path / "handed").write_bytes(handed.content)
    read = [*read_segment(tmp_path / "handed", header, buffer.refusals)]
    assert read == [*buffer][:6] and not buffer.refusals.count
    outputs = [entry.sample.token_T[entry.sample.prompt_len :].tolist() for entry in buffer]
    again = [c.token_ids for c in expected]
    assert sorted(outputs[:6]) == sorted([*again, *again]) and outputs[6:] == [again[0]]
    assert len({entry.sample.prompt_key for entry in buffer}) == 1
    assert all(entry.sample.cycles for entry in buffer)
