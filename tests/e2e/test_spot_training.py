"""A server trains its own drafter in idle time: a weak drafter becomes better, tokens stay the
same, and a trainer that is killed goes on from its checkpoint.
"""

import os
import shutil
import signal
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import xxhash
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from tests.e2e.test_drafter_training import figures
from tests.processes import trainer
from tests.waiting import until
from tlt_client import Client
from tlt_client.channels.checkpoint import CALIBRATION, SINGLE
from tlt_client.channels.http import HttpSender
from tlt_client.errors import Conflict
from tlt_client.wire import Choice
from tlt_server.demo import chat, task
from tlt_server.demo.push import perturbed_copy
from tlt_server.demo.server import ServerProcess
from tlt_server.demo.workload import TARGET
from tlt_server.trainer.recording.sampling import HELD_OUT

SPOILT = ("fc.weight", "midlayer.self_attn.o_proj.weight", "midlayer.mlp.down_proj.weight")
TRAINED, JUDGED = 18, 28  # prompts
FLAGS = ("--drafter-training", "idle", "--drafter-feature-mb", "256", "--kv-memory-mb", "64")


@pytest.fixture(scope="module")
def weak_drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped drafter with noise in some of its matrices."""
    return weakened(tmp_path_factory.mktemp("weak") / "drafter")


def weakened(directory: Path) -> Path:
    """Write the shipped drafter with noise."""
    shutil.copytree(TARGET.parent / "drafter", directory)
    tensors, random = load_file(directory / "model.safetensors"), torch.Generator().manual_seed(0)
    for name in SPOILT:
        noise = torch.randn(tensors[name].shape, generator=random)
        weight = tensors[name].float()
        tensors[name] = (weight + weight.std() * noise).bfloat16()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@cache
def items() -> list[dict[str, Any]]:
    """Prompts to train on and prompts that are held out, by the hash that decides."""
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    found: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    for seed in count():
        if len(found[False]) >= TRAINED and len(found[True]) >= JUDGED:
            break
        text = task.problem(seed).prompt_text
        ids = np.array(tokenizer.encode(chat.render_prompt(text)).ids, "<i4").tobytes()
        key = xxhash.xxh3_64_intdigest(ids).to_bytes(8, "little")
        held = xxhash.xxh3_64_intdigest(key) % HELD_OUT == 0
        message = {"role": "user", "content": text}
        found[held].append({"messages": [message], "seed": seed, "sampling": {"max_tokens": 64}})
    return found[False][:TRAINED] + found[True][:JUDGED]


@pytest.fixture(scope="module")
def weight_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("weights")


def serving(drafter: Path, weight_root: Path, state: Path) -> ServerProcess:
    flags = ("--model", str(TARGET), "--drafter", str(drafter), "--state-dir", str(state))
    flags += ("--weight-root", str(weight_root), "--weight-channels", "disk,http")
    return ServerProcess(*flags, *FLAGS)


@pytest.fixture(scope="module")
def own(
    weak_drafter: Path, weight_root: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Client]:
    """A client of a server whose drafter is weak."""
    with (
        serving(weak_drafter, weight_root, tmp_path_factory.mktemp("state")) as server,
        Client(server.url, timeout_s=60) as client,
    ):
        client.set_strategy("fixed", "eagle:4x1x5")  # a loaded machine may find drafting too slow
        yield client


def status(client: Client) -> Mapping[str, Any]:
    found: Mapping[str, Any] = client.drafter()["trainer"]
    return found


def ended(found: Mapping[str, Any]) -> int:
    """Count the rounds with an outcome."""
    refused: int = sum(found["refused"].values())
    return refused + int(found["adopted"])


def begin(client: Client) -> list[Choice]:
    """Have a round begin, and return the responses that it learns from."""
    said = [result.choices[0] for result in client.generate(items()).results]
    until(lambda: client.drafter()["buffer"]["sequences"] == TRAINED + JUDGED)
    until(lambda: status(client)["process"] == "running")
    client.train_drafter()
    return said


def check_adopted(client: Client) -> Mapping[str, Any]:
    """Wait for the round's end, whose candidate must have been better."""
    until(lambda: ended(status(client)))
    found = status(client)
    assert found["adopted"] == 1, (found["refused"], found["candidate"])
    candidate = found["candidate"]
    assert candidate["outcome"] == "adopted" and candidate["interval"][0] > 0
    assert candidate["accept_length"] > 1.2 * candidate["accept_length_before"]
    assert 0 < candidate["ms_per_token"] < candidate["ms_per_token_before"]
    per_token = candidate["ms_per_cycle"] / candidate["accept_length"]
    assert candidate["ms_per_token"] == pytest.approx(per_token)
    assert found["compared_cycles"] > 0 and found["different_cycles"] == 0
    return found


def test_weak_drafter_is_trained_and_adopted_exactly(own: Client) -> None:
    before = begin(own)
    until(lambda: status(own)["state"] in ("training", "evaluating"))
    with pytest.raises(Conflict, match="a round is in progress"):
        own.train_drafter()
    check_adopted(own)
    served = own.drafter()["drafters"][0]
    assert served["weight_version"].startswith("drafter-initial-")
    assert served["trained_for"] == "initial"
    again = [result.choices[0] for result in own.generate(items()).results]
    assert [c.token_ids for c in again] == [c.token_ids for c in before]
    assert [c.logprobs for c in again] == [c.logprobs for c in before]
    seen = figures(own)
    assert seen["tlt_drafter_adoptions_total"] == 1
    assert seen["tlt_drafter_self_check_differences_total"] == 0


@pytest.mark.long
def test_killed_trainer_resumes_from_its_checkpoint(
    weak_drafter: Path, weight_root: Path, tmp_path: Path
) -> None:
    with (
        serving(weak_drafter, weight_root, tmp_path) as server,
        Client(server.url, timeout_s=60) as client,
    ):
        begin(client)
        until(lambda: status(client)["state"] == "evaluating")
        assert client.pause_drafter_training()["state"] == "paused"
        until(lambda: status(client)["checkpoints"] >= 2)
        os.kill(trainer(server.process.pid), signal.SIGKILL)
        until(lambda: status(client)["restarts"] == 1 and status(client)["process"] == "running")
        # Features were in the memory of the killed process: the engine computes them again.
        until(lambda: status(client)["state"] == "paused")  # an order outlives the process
        client.resume_drafter_training()
        client.train_drafter()
        found = check_adopted(client)
        assert found["steps"] == 48  # the killed process had written its checkpoint, of 24
        # It had the first candidate, too, whose number is not given again.
        version = client.drafter()["drafters"][0]["weight_version"]
        assert version.startswith("drafter-initial-2-")
        assert 0 < found["recomputed_tokens"] == found["tokens"]


def test_operator_commands_are_obeyed_and_drafter_rolls_back(own: Client) -> None:
    client = own
    assert client.pause_drafter_training()["state"] == "paused"
    with pytest.raises(Conflict, match="POST /drafter/resume"):
        client.train_drafter()
    assert client.pause_drafter_training()["state"] == "paused"  # twice is as once
    assert client.rollback_drafter()["state"] == "rolled_back"
    assert client.drafter()["drafters"][0]["weight_version"] == "initial"
    with pytest.raises(Conflict, match="no version of the drafter is kept"):
        client.rollback_drafter()
    exported = client.export_drafter("one", "sglang")
    assert exported["version"] == "initial" and "same bits" in exported["said"]
    assert (Path(exported["directory"]) / "model.safetensors").is_file()
    with pytest.raises(Conflict, match="exists"):
        client.export_drafter("one", "sglang")
    assert client.resume_drafter_training()["state"] in ("idle", "parked")


@pytest.mark.long
def test_training_restarts_after_a_push_of_the_target(own: Client, weight_root: Path) -> None:
    client, before = own, status(own)
    perturbed_copy(TARGET, weight_root / "step-1")
    assert client.update_weights("step-1", "step-1")["state"] == "committed"
    kept = client.drafter()["buffer"]["sequences"]
    client.generate(items())
    until(lambda: client.drafter()["buffer"]["sequences"] == kept + TRAINED + JUDGED)
    with suppress(Conflict):  # the push makes a round due, which may have begun
        client.train_drafter()
    until(lambda: (status(client)["candidate"] or {}).get("target_version") == "step-1")
    found = client.pause_drafter_training()
    assert found["rounds"] > before["rounds"] and found["restarts"] == before["restarts"]
    assert client.sleep("weights").asleep == ["weights"]  # once the trainer has let go, too
    client.wake()


@pytest.mark.long
def test_client_pushes_the_candidate_with_its_next_target(
    own: Client, weight_root: Path, tmp_path: Path
) -> None:
    """The trainer is paused, so the candidate of the test before is the last one."""
    client = own
    found = client.fetch_drafter(tmp_path / "candidate", of="candidate")
    assert found["candidate"] == status(client)["candidate"]
    assert found["candidate"]["target_version"] == found["target_version"] == "step-1"
    perturbed_copy(TARGET, weight_root / "step-2", 2)
    pushed = HttpSender(client).push_directory(
        weight_root / "step-2", "step-2", drafter=tmp_path / "candidate", role="all"
    )
    assert pushed["state"] == "committed"
    weights = client.weights()
    assert (weights["target"], weights["drafter"]) == ("step-2", "step-2")
    client.fetch_drafter(tmp_path / "live")
    candidate = load_file(tmp_path / "candidate" / SINGLE)
    live = {}
    for file in (tmp_path / "live").glob("*.safetensors"):
        live |= load_file(file)
    assert live.keys() <= candidate.keys(), live.keys() ^ candidate.keys()
    assert len(live) > 9 and all(torch.equal(candidate[name], live[name]) for name in live)
    tables = [(tmp_path / name / CALIBRATION).read_bytes() for name in ("candidate", "live")]
    assert tables[0] == tables[1]


def test_a_server_without_a_trainer_names_the_remedy(server: ServerProcess) -> None:
    for order in ("train", "pause", "resume"):
        reply = httpx.post(f"{server.url}/drafter/{order}")
        assert reply.status_code == 409
        assert "--drafter-training idle" in reply.json()["error"]["message"]
