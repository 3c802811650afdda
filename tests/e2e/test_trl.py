"""TRL's own trainers through the shipped adapter, against a real server that speculates, in float32
on the CPU, with one rank and with two.

Whenever a trainer's weights were pushed and completions came, what the trainer holds is compared
with what the server holds, tensor by tensor, and the log-probs that the server sent with those of a
forward pass of the trainer's model. `wrong` says what differs; it must say nothing, and it must
speak up when pushes are lost. (TRL has this difference as a metric,
`sampling/sampling_logp_difference`, but computes it for vLLM only.)
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.e2e.looks import Looks, lost
from tests.processes import completed
from tlt_client import Client
from tlt_client.adapters.trl import OffPolicy, OpenSender, RolloutFunc, WeightTransfer
from tlt_client.channels.broadcast import BroadcastSender
from tlt_client.channels.disk import DiskSender
from tlt_client.channels.http import HttpSender
from tlt_server.demo.chat import render_prompt
from tlt_server.demo.server import ServerProcess
from tlt_server.demo.task import problem
from tlt_server.demo.workload import TARGET

if TYPE_CHECKING:  # their import takes four seconds
    from trl import GRPOTrainer

    from tests.e2e.async_grpo import Completions

pytestmark = pytest.mark.fleet

ROOT = Path(__file__).parents[2]
LEARNING_RATE = 1e-3
PROMPTS, COMPLETIONS, MAX_TOKENS = 2, 4, 48
STEPS, ASYNC_STEPS = 2, 3
BROADCAST = pytest.param("broadcast", 1, marks=pytest.mark.long)


def policy(seed: int) -> Any:
    """Weights that the server has not seen."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1e-3 * torch.randn(parameter.shape, generator=generator)
    return model


@pytest.fixture(scope="module")
def server(pushable: ServerProcess) -> ServerProcess:
    """Return a server with a fixed strategy: an adaptive one may find that plain decoding is faster
    here.
    """
    return pushable


@pytest.fixture
def senders(weight_root: Path) -> dict[str, OpenSender]:
    return {
        "http": HttpSender,
        "broadcast": BroadcastSender,
        "disk": lambda client: DiskSender(client, weight_root),
    }


class Stale(HttpSender):
    """Loses every push but the first: it sends the same weights again, under the new name."""

    def push(self, tensors: Any, version: str, **fields: Any) -> Any:
        self.first = getattr(self, "first", None) or [
            (name, tensor.clone()) for name, tensor in tensors
        ]
        return super().push(self.first, version, **fields)


class Lost(HttpSender):
    def push(self, tensors: Any, version: str, **fields: Any) -> Any:
        return {"state": "committed"}


def accepted(client: Client) -> float:
    """Draft tokens so far."""
    lines = [
        line
        for line in client.metrics().splitlines()
        if line.startswith("tlt_sd_accepted_tokens_total{")
    ]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


# GRPOTrainer


def varied(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward that the completions of a prompt do not share, so that each step has a gradient."""
    return [float(sum(ids) % 97) for ids in completion_ids]


def grpo(rollout_func: Callable[..., Any], seed: int, steps: int, place: Path) -> GRPOTrainer:
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    args = GRPOConfig(
        str(place),
        max_steps=steps,
        per_device_train_batch_size=PROMPTS * COMPLETIONS,
        num_generations=COMPLETIONS,
        max_completion_length=MAX_TOKENS,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    prompts = [[{"role": "user", "content": problem(i).prompt_text}] for i in range(10)]
    return GRPOTrainer(
        policy(seed),
        varied,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=AutoTokenizer.from_pretrained(TARGET),
        rollout_func=rollout_func,
    )


class Watched(Looks):
    """The shipped object, and a look after each of its calls."""

    def __init__(self, client: Client, sender: OpenSender) -> None:
        super().__init__(client)
        self.func = RolloutFunc(client, sender)

    def __call__(self, prompts: list[Any], trainer: GRPOTrainer) -> dict[str, list[Any]]:
        said = self.func(prompts, trainer)
        assert len(said["completion_ids"]) == len(prompts) == PROMPTS * COMPLETIONS
        self.look(
            trainer.model,
            list(zip(said["prompt_ids"], said["completion_ids"], said["logprobs"], strict=True)),
        )
        return said


@pytest.mark.parametrize(("channel", "steps"), [("http", STEPS), ("disk", 1), BROADCAST])
def test_server_weights_equal_the_trainers_after_every_step(
    channel: str, steps: int, client: Client, senders: dict[str, OpenSender], tmp_path: Path
) -> None:
    watched, before = Watched(client, senders[channel]), accepted(client)
    trainer = grpo(watched, 1 + len(channel), steps, tmp_path)
    trainer.train()
    assert trainer.state.global_step == steps == len(watched.seen)
    watched(
        [trainer.train_dataset[i // COMPLETIONS]["prompt"] for i in range(PROMPTS * COMPLETIONS)],
        trainer,
    )  # after the last step
    watched.func.close()
    assert watched.wrong() == []
    assert max(seen.mean for seen in watched.seen) < 1e-6
    assert accepted(client) > before, "nothing was speculated, so exactness was not at stake"
    assert client.weights()["groups"] == []


RANK = """
import json, os, sys
from pathlib import Path
from tests.e2e.test_trl import Watched, grpo
from tlt_client import Client
from tlt_client.channels.http import HttpSender

url, place = sys.argv[1], Path(sys.argv[2])
with Client(url, timeout_s=60) as client:
    watched = Watched(client, HttpSender)
    trainer = grpo(watched, 12, 2, place)
    trainer.train()
    rank = trainer.accelerator.process_index
    found = [watched.wrong(), [seen.live for seen in watched.seen]]
    (place / f"rank-{rank}.json").write_text(json.dumps(found))
    trainer.accelerator.end_training()  # joins gloo's threads, or their end aborts the process
os._exit(0)  # those of torch's store may abort it, too
"""


@pytest.mark.long
def test_joint_trainers_push_once_and_sample_the_same_weights(
    server: ServerProcess, tmp_path: Path
) -> None:
    done = completed(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            "--no-python",
            sys.executable,
            "-c",
            RANK,
            server.url,
            str(tmp_path),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    ranks = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2)]
    assert ranks[0] == ranks[1] and ranks[0][0] == [] and len(ranks[0][1]) == 2


@pytest.mark.long
def test_the_example_trains_with_an_adapting_drafter() -> None:
    size = ("--prompts", "1", "--completions", "2", "--max-tokens", "16")
    done = completed(
        [sys.executable, "-m", "examples.trl.train", "--adaptive", "--steps", "1", *size],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    first, last = done.stdout.splitlines()
    assert first.startswith("step   1 of 1  reward ")
    assert first.endswith("drafter trained in 0 rounds, adopted 0 times")
    assert re.fullmatch("the server has trl-.*, the weights after step 1", last), last


def test_comparison_with_the_trainer_detects_lost_pushes(client: Client, tmp_path: Path) -> None:
    watched = Watched(client, Stale)
    grpo(watched, 10, STEPS, tmp_path).train()
    assert watched.wrong() == lost(range(1, STEPS))
    assert min(seen.mean for seen in watched.seen[1:]) > 1e-3


def test_adapter_refuses_tokens_not_from_the_pushed_weights(client: Client, tmp_path: Path) -> None:
    with pytest.raises(OffPolicy, match=r"the policy was pushed as 'trl-\w+-1'"):
        grpo(Watched(client, Lost), 11, 1, tmp_path).train()


# AsyncGRPOTrainer


def async_grpo(
    client: Client, url: str, sender: OpenSender, seed: int, place: Path
) -> tuple[Looks, list[dict[str, Any]]]:
    """Return what was seen after each push, and what TRL logged."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    from tests.e2e.async_grpo import LockstepWorker, on_cpu

    tokenizer, looks = AutoTokenizer.from_pretrained(TARGET), Looks(client)
    policy(seed).save_pretrained(place / "policy")
    prompt: list[int] = tokenizer(render_prompt(problem(3).prompt_text))["input_ids"]

    def look(said: Completions) -> None:
        if len(looks.seen) < len(worker.versions):  # once for each push
            looks.look(trainer.model, said)
            assert client.weights()["target"] == f"async-{seed}-{worker.versions[-1]}", (
                "counted as TRL counts"
            )

    worker = LockstepWorker(url, TARGET.name, prompt, COMPLETIONS, MAX_TOKENS, look)
    args = AsyncGRPOConfig(
        str(place),
        max_steps=ASYNC_STEPS,
        per_device_train_batch_size=COMPLETIONS,
        num_generations=COMPLETIONS,
        max_completion_length=MAX_TOKENS,
        learning_rate=LEARNING_RATE / 4,
        token_budget=-1,
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        vllm_server_base_url=url,
    )
    with on_cpu() as attend:
        trainer = AsyncGRPOTrainer(
            str(place / "policy"),
            varied,
            args=args,
            train_dataset=Dataset.from_dict({"prompt": ["-"]}),
            processing_class=tokenizer,
            rollout_worker=worker,
            weight_transfer=WeightTransfer(client, sender, run=f"async-{seed}"),
        )
        attend()
        trainer.train()
    assert worker.versions == list(range(1, ASYNC_STEPS + 2)) and len(looks.seen) == ASYNC_STEPS + 1
    return looks, trainer.state.log_history


@pytest.mark.long
@pytest.mark.parametrize("channel", ["http", "broadcast"])
def test_asynchronous_trainer_pushes_after_every_step(
    channel: str,
    server: ServerProcess,
    client: Client,
    senders: dict[str, OpenSender],
    tmp_path: Path,
) -> None:
    looks, logged = async_grpo(client, server.url, senders[channel], 20 + len(channel), tmp_path)
    assert looks.wrong() == []
    assert max(seen.mean for seen in looks.seen) < 1e-6
    assert abs(logged[0]["ratio"] - 1) < 1e-5 and abs(logged[0]["kl"]) < 1e-6, (
        "TRL's own, of the step that learns from its own tokens"
    )
    assert abs(logged[1]["kl"]) > 1e-4, "the next one was sampled before a step"
    assert client.weights()["groups"] == []


@pytest.mark.long
def test_comparison_detects_lost_pushes_of_asynchronous_trainer(
    server: ServerProcess, client: Client, tmp_path: Path
) -> None:
    looks, _ = async_grpo(client, server.url, Stale, 40, tmp_path)
    assert looks.wrong() == lost(range(1, ASYNC_STEPS + 1))
