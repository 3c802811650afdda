"""OpenRLHF's order of calls on its rollout actors, over real gloo groups against a real server of
one rank and of two.

Two trainers make their half of the group: `TrainerGroup`, and torch's helper for named groups, as
OpenRLHF's releases did that had no communicator of vLLM. That itself needs two GPUs: see
`test_channels_on_gpu`. OpenRLHF itself is not run: the orders are written after its source
(0.11.2), and Ray is left out, as the actor is a plain class with it or without.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, distributed

from tests.e2e.gloo_trainer import HOST, free_port, named_group, sums, weights
from tests.e2e.trainers import Calls
from tests.waiting import in_loop, until
from tlt_client import Client, TltClientError
from tlt_client.adapters.errors import NotServed
from tlt_client.adapters.openrlhf import RolloutActor, TrainerGroup
from tlt_server.demo.rounds import look
from tlt_server.demo.server import ServerProcess

PROMPT = list(b"Compute 3*4+5.")
Broadcast = Callable[[Tensor], None]


def params(**fields: Any) -> Any:
    """Return vLLM's SamplingParams, with what OpenRLHF sets and what it leaves."""
    return SimpleNamespace(
        **{
            "n": 1,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "max_tokens": 40,
            "min_tokens": 1,
            "seed": None,
            "stop": [],
            "stop_token_ids": [],
            "ignore_eos": True,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "logit_bias": None,
            "skip_special_tokens": False,
            "logprobs": 1,
            **fields,
        }
    )


def by_communicator(port: int, name: str) -> Broadcast:
    group = TrainerGroup(HOST, port, 2, group_name=name)
    return lambda tensor: group.broadcast(tensor, src=0, stream=None)


def by_named_group(port: int, name: str) -> Broadcast:
    group = named_group(port, name)
    return lambda tensor: distributed.broadcast(tensor, 0, group=group)


class Executor:
    """Asks the actor as OpenRLHF's SingleTurnAgentExecutor does, and reads the reply as it does."""

    async def execute(
        self,
        prompt: str,
        label: str,
        sampling_params: Any,
        max_length: int,
        hf_tokenizer: Any,
        llm_engine: Any,
        images: Any = None,
    ) -> dict[str, Any]:
        ids = list(prompt.encode())
        output = await llm_engine.generate(ids, deepcopy(sampling_params), multi_modal_data=None)
        one = output.outputs[0]
        logprobs = [0.0] * len(ids) + [
            of[token].logprob for token, of in zip(one.token_ids, one.logprobs, strict=True)
        ]
        return {
            "observation_tokens": ids + one.token_ids,
            "rollout_log_probs": logprobs,
            "truncated": one.finish_reason == "length",
            "label": label,
        }


@pytest.fixture(scope="module")
def running(pushable: ServerProcess) -> ServerProcess:
    """Return a server that does not draft, so that responses outlast a push."""
    with Client(pushable.url, timeout_s=60) as client:
        client.set_strategy("off")
    return pushable


def await_four(url: str) -> None:
    """Wait until each of four requests has tokens."""
    with Client(url, timeout_s=60) as client:
        until(lambda: look(client).running == 4)
    Calls(url).await_tokens()


@pytest.mark.parametrize(
    ("trainer", "steps"),
    [
        (by_communicator, 1),
        pytest.param(by_communicator, 2, marks=pytest.mark.long),
        pytest.param(by_named_group, 2, marks=pytest.mark.long),
    ],
)
def test_openrlhf_call_order_works_while_rollouts_run(
    running: ServerProcess, trainer: Callable[[int, str], Broadcast], steps: int
) -> None:
    """Join once; then for each step: pause, forget prefixes, every parameter one by one, resume.
    Responses go on under the new weights.
    """

    async def meanwhile(call: Awaitable[Any], own: Callable[[], Any]) -> Any:
        """A call to the actor, and what the trainer does before it waits for the reply."""
        asked = asyncio.ensure_future(call)
        done = await asyncio.to_thread(own)
        return await asked, done

    async def trained() -> None:
        actor = RolloutActor(running.url, executor=Executor())
        port = free_port()
        name = f"{trainer.__name__}-{steps}-{port}"  # torch knows a name once in a process
        _, broadcast = await meanwhile(
            actor.init_process_group(HOST, port, 1, 2, name, backend="gloo", use_ray=False),
            lambda: trainer(port, name),
        )
        tokens = 800 * steps
        long = [
            asyncio.ensure_future(actor.generate(PROMPT, params(max_tokens=tokens, seed=i)))
            for i in range(4)
        ]
        await asyncio.to_thread(await_four, running.url)
        for step in range(1, steps + 1):
            sent = weights(step + 10 * steps + 100 * len(trainer.__name__))
            await actor.pause_generation()
            assert actor.get_num_unfinished_requests() == 4
            await actor.reset_prefix_cache()
            before = await asyncio.to_thread(live)
            states = []
            for count, (parameter, tensor) in enumerate(sent, 1):
                state, _ = await meanwhile(
                    actor.update_weight(
                        parameter,
                        dtype=tensor.dtype,
                        shape=tensor.shape,
                        empty_cache=count == len(sent),
                    ),
                    lambda tensor=tensor: broadcast(tensor),
                )  # type: ignore[misc]
                states.append(state)
            assert states == ["gathering"] * (len(sent) - 1) + ["committed"]
            now, mine = await asyncio.to_thread(live), sums(sent)
            assert {each: now[each] for each in mine} == mine
            assert all(before[each] != mine[each] for each in mine)
            await actor.resume_generation()
            await asyncio.sleep(0.1)
        for output in await asyncio.gather(*long):
            one = output.outputs[0]
            assert len(one.token_ids) == len(one.logprobs) == tokens
            assert one.finish_reason == "length" and len(one.weight_versions) > 1
            assert one.weight_versions[-1].version.endswith(f"-{steps}")
        samples = await actor.generate_responses(
            "Compute 3*4+5.", "17", params(), 512, None, num_samples=3
        )
        assert (
            len(samples) == 3
            and len({tuple(sample["observation_tokens"]) for sample in samples}) > 1
        ), "each has a seed of its own"
        assert all(
            len(sample["rollout_log_probs"]) == len(sample["observation_tokens"])
            and sample["truncated"]
            for sample in samples
        )
        assert actor.get_num_unfinished_requests() == 0

    def live() -> dict[str, str]:
        with Client(running.url, timeout_s=60) as client:
            return dict(client.weight_checksums())

    asyncio.run(trained())


def test_replies_of_the_actor_equal_the_servers(running: ServerProcess) -> None:
    async def both() -> list[Any]:
        actor = RolloutActor(running.url)
        await actor.sleep(level=2)
        with pytest.raises(TltClientError, match="sleeps"):
            await actor.generate(PROMPT, params())
        await actor.wake_up(tags=["weights"])
        await actor.wake_up()
        return [
            (await actor.generate(PROMPT, params(seed=3, **fields))).outputs[0]
            for fields in ({}, {"logprobs": None, "top_k": 1})
        ]

    sampled, greedy = asyncio.run(both())
    with Client(running.url, timeout_s=60) as client:
        said = (
            client.generate(
                [{"token_ids": PROMPT, "seed": 3}], sampling={"max_tokens": 40, "ignore_eos": True}
            )
            .results[0]
            .choices[0]
        )
        best = client.generate(
            [{"token_ids": PROMPT}],
            sampling={"max_tokens": 40, "ignore_eos": True, "temperature": 0.0},
        )
    assert (sampled.token_ids, sampled.text) == (said.token_ids, said.text)
    assert [
        of[token].logprob for token, of in zip(sampled.token_ids, sampled.logprobs, strict=True)
    ] == said.logprobs
    assert greedy.logprobs is None and greedy.token_ids == best.results[0].choices[0].token_ids


@pytest.mark.parametrize(
    ("call", "remedy"),
    [
        (
            lambda actor: actor.init_process_group(
                HOST, 1, 1, 2, "g", backend="gloo", use_ray=True
            ),
            "sync_with_ray",
        ),
        (
            lambda actor: actor.update_weight_cuda_ipc("w", torch.float32, [1], {}),
            "sync_backend gloo",
        ),
        (
            lambda actor: actor.generate([1], params(), multi_modal_data={"image": []}),
            "leave it out",
        ),
        (lambda actor: actor.generate([1], params(n=2)), "once for each choice"),
    ],
)
def test_unsupported_calls_are_refused_with_a_remedy(
    call: Callable[[RolloutActor], Awaitable[Any]], remedy: str
) -> None:
    async def asked() -> None:
        await call(RolloutActor("http://127.0.0.1:9"))

    with pytest.raises(NotServed, match=remedy):
        asyncio.run(asked())


@in_loop
async def test_missing_parameters_are_reported_with_the_last_parameter(
    running: ServerProcess,
) -> None:
    name, tensor = weights(1)[0]
    actor, port = RolloutActor(running.url), free_port()
    joined = asyncio.ensure_future(
        actor.init_process_group(HOST, port, 1, 2, "short", backend="gloo", use_ray=False)
    )
    group = await asyncio.to_thread(TrainerGroup, HOST, port, 2, group_name="short")
    await joined
    asked = asyncio.ensure_future(
        actor.update_weight(name, tensor.dtype, tensor.shape, empty_cache=True)
    )
    await asyncio.to_thread(group.broadcast, tensor)
    with pytest.raises(NotServed, match="all of its parameters"):
        await asked
    group.close()


def test_actor_methods_take_the_parameters_of_openrlhf() -> None:
    """The parameters are those of RolloutRayActor in OpenRLHF 0.11.2."""
    called = {
        "init_process_group": [
            *("master_address", "master_port", "rank_offset", "world_size", "group_name"),
            *("backend", "use_ray"),
        ],
        "update_weight": ["name", "dtype", "shape", "empty_cache"],
        "reset_prefix_cache": [],
        "pause_generation": [],
        "resume_generation": [],
        "sleep": ["level"],
        "wake_up": ["tags"],
        "get_num_unfinished_requests": [],
        "generate": ["prompt_token_ids", "sampling_params", "multi_modal_data"],
        "generate_responses": [
            *("prompt", "label", "sampling_params", "max_length", "hf_tokenizer"),
            *("num_samples", "images"),
        ],
    }
    assert {
        name: list(inspect.signature(getattr(RolloutActor, name)).parameters)[1:] for name in called
    } == called
