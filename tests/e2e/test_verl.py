"""verl's rollout backend against a real server of one rank and of two: what verl's clients ask, and
its order of calls around an update of weights.

With verl and ray installed their real classes and actors are used; else stand-ins with the
signatures of verl 0.9.1.
"""

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.e2e import verl_standin
from tests.e2e.gloo_trainer import Named, sums, weights
from tests.e2e.trainers import Calls
from tlt_client import Client, TltClientError
from tlt_client.adapters import verl as adapter
from tlt_server.demo.server import ServerProcess

pytestmark = pytest.mark.fleet

PROMPT = list(b"Compute 3*4+5.")
INSTALLED = find_spec("verl") is not None and find_spec("ray") is not None


@pytest.fixture(scope="module", params=["verl" if INSTALLED else "stand-in"])
def verl_(request: pytest.FixtureRequest) -> Iterator[None]:
    """`import verl` works. What the adapter has made of its classes before or will make after is
    not kept.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", "0")
        for name, module in ({} if INSTALLED else verl_standin.modules()).items():
            patch.setitem(sys.modules, name, module)
        if INSTALLED:
            import ray

            ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
        yield
        if INSTALLED:
            ray.shutdown()
    adapter.replica_class.cache_clear()
    adapter.rollout_class.cache_clear()


@pytest.fixture
def config(verl_: None, pushable: ServerProcess) -> Any:
    from verl.workers.config import RolloutConfig

    return RolloutConfig(
        name="tlt",
        tensor_model_parallel_size=1,
        response_length=300,
        ignore_eos=True,
        engine_kwargs={"tlt": {"urls": [pushable.url]}},
    )


async def launched(config: Any) -> Any:
    from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry

    adapter.register()
    replica = RolloutReplicaRegistry.get("tlt")(replica_rank=0, config=config, model_config=None)
    assert isinstance(replica, RolloutReplica)
    await replica.launch_servers()
    return replica


def buffered(named: Named) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors as verl's checkpoint engines do: each is a view of one buffer, which the next
    tensor overwrites.
    """
    buffer = torch.empty(max(tensor.numel() for _, tensor in named))
    for name, tensor in named:
        view = buffer[: tensor.numel()].view(tensor.shape)
        view.copy_(tensor)
        yield name, view


async def received(named: Named) -> AsyncIterator[tuple[str, Tensor]]:
    for item in buffered(named):
        await asyncio.sleep(0)
        yield item


def asked(replica: Any, i: int, **params: Any) -> Awaitable[Any]:
    """Ask as LLMServerClient does."""
    result: Awaitable[Any] = replica.server_handle.generate.remote(
        request_id=f"r{i}",
        prompt_ids=params.pop("prompt", PROMPT),
        image_data=None,
        video_data=None,
        sampling_params={
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "logprobs": True,
            "seed": i,
            **params,
        },
    )
    return result


def test_requests_of_verl_give_the_servers_tokens_and_logprobs(
    config: Any, pushable: ServerProcess
) -> None:
    async def both() -> list[Any]:
        replica = await launched(config)
        assert pushable.url.endswith(replica.server_address)
        return [
            await asked(replica, 5, max_tokens=40),
            await asked(replica, 5, max_new_tokens=40),
            await asked(replica, 6),
            await asked(replica, 7, max_tokens=10**6, ignore_eos=False),
        ]

    first, second, long, clipped = asyncio.run(both())
    with Client(pushable.url, timeout_s=60) as client:
        said = (
            client.generate(
                [{"token_ids": PROMPT, "seed": 5}], sampling={"max_tokens": 40, "ignore_eos": True}
            )
            .results[0]
            .choices[0]
        )
    assert (first.token_ids, first.log_probs) == (said.token_ids, said.logprobs)
    assert first.stop_reason == "completed"
    assert second.token_ids == first.token_ids and len(long.token_ids) == config.response_length
    assert clipped.stop_reason == "completed"
    assert first.extra_fields["global_steps"] is None, "nothing was pushed"
    assert first.extra_fields["spec_num_verify_steps"] > 0


@pytest.mark.parametrize(
    "packaged", [iter, buffered, received], ids=["tensors", "one buffer", "asynchronous"]
)
def test_pushed_weights_become_active_unchanged(
    config: Any, pushable: ServerProcess, packaged: Callable[[Named], Any]
) -> None:
    step = {iter: 3, buffered: 4, received: 5}[packaged]
    sent = weights(step)

    async def pushed() -> Any:
        replica = await launched(config)
        await adapter.rollout_class()(config, None, None).update_weights(
            packaged(sent), global_steps=step, peft_config=None
        )
        return await asked(replica, 1, max_tokens=8)

    output = asyncio.run(pushed())
    assert {
        name: output.extra_fields[name]
        for name in ("min_global_steps", "max_global_steps", "global_steps")
    } == {"min_global_steps": step, "max_global_steps": step, "global_steps": step}
    with Client(pushable.url, timeout_s=30) as client:
        live, mine = client.weight_checksums(), sums(sent)
        assert {name: live[name] for name in mine} == mine
        assert client.weights()["target"].endswith(f"-{step}")


def test_verl_update_order_works_while_requests_run(config: Any, pushable: ServerProcess) -> None:
    """CheckpointEngineManager: abort, release the KV, push, take the KV again, resume. Clients ask
    again with what they had.
    """
    sent, calls = weights(6), Calls(pushable.url)

    async def whole(replica: Any, i: int) -> tuple[list[int], list[Any], bool]:
        """Ask until a response is whole, as FullyAsyncLLMServerClient does."""
        tokens: list[int] = []
        steps: list[Any] = []
        aborted = False
        while True:
            output = await asked(replica, i, prompt=PROMPT + tokens, max_tokens=300 - len(tokens))
            tokens += output.token_ids
            if output.token_ids:
                steps += [
                    output.extra_fields["min_global_steps"],
                    output.extra_fields["max_global_steps"],
                ]
            assert len(output.log_probs or ()) == len(output.token_ids)
            if output.stop_reason != "aborted":
                return tokens, steps, aborted
            aborted = True

    async def updated() -> tuple[list[tuple[list[int], list[Any], bool]], Any]:
        replica = await launched(config)
        rollout = adapter.rollout_class()(config, None, None)
        await rollout.update_weights(iter(weights(5)), global_steps=5)
        running = [asyncio.ensure_future(whole(replica, i)) for i in range(4)]
        await asyncio.to_thread(calls.await_tokens)
        await replica.abort_all_requests()
        late = asyncio.ensure_future(asked(replica, 50, max_tokens=4))
        await asyncio.sleep(0.2)
        assert not late.done(), "what comes meanwhile waits"
        await replica.release_kv_cache()
        await rollout.update_weights(received(sent), global_steps=6)
        await replica.resume_kv_cache()
        await replica.resume_generation()
        await replica.clear_kv_cache()
        assert (await late).extra_fields["global_steps"] == 6
        done = await asyncio.gather(*running)
        await replica.abort_all_requests(reject_request=True)
        rejected = await asked(replica, 51)
        await replica.resume_generation()
        await replica.sleep()
        assert (await asked(replica, 52, max_tokens=4)).stop_reason == "completed"
        return done, rejected

    done, rejected = asyncio.run(updated())
    assert (rejected.token_ids, rejected.stop_reason) == ([], "aborted")
    assert rejected.extra_fields["global_steps"] == 6
    assert any(aborted for _, _, aborted in done)
    for tokens, steps, _ in done:
        assert len(tokens) == 300 and steps == sorted(steps) and set(steps) <= {5, 6}


def test_rollout_releases_and_retakes_memory_and_pushes_by_disk(
    config: Any, pushable: ServerProcess, weight_root: Path
) -> None:
    before = sorted(weight_root.iterdir())
    with Client(pushable.url, timeout_s=30) as client:
        config.engine_kwargs["tlt"]["weight_root"] = str(weight_root)
        rollout = adapter.rollout_class()(config, None, None)
        asyncio.run(rollout.release())
        with pytest.raises(TltClientError, match="sleeps"):
            client.generate([{"prompt": "a"}])
        asyncio.run(rollout.resume(["weights"]))
        asyncio.run(rollout.update_weights(iter(weights(7)), global_steps=7))
        asyncio.run(rollout.resume(["kv_cache"]))
        said = client.generate([{"prompt": "a"}], sampling={"max_tokens": 2}).results[0].choices[0]
        assert said.weight_versions[0].version.endswith("-7")
    assert sorted(weight_root.iterdir()) == before


def test_only_the_first_worker_of_a_replica_pushes(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from verl.workers.config import RolloutConfig

    wide = RolloutConfig(
        name="tlt",
        tensor_model_parallel_size=2,
        engine_kwargs={"tlt": {"urls": ["http://127.0.0.1:9"] * 3}},
    )
    taken: list[str] = []

    def gathered() -> Iterator[tuple[str, Tensor]]:
        for name in ("a", "b"):
            taken.append(name)
            yield name, torch.zeros(1)

    monkeypatch.setenv("RANK", "5")
    rollout = adapter.rollout_class()(wide, None, None)
    assert (rollout.replica_rank, rollout.is_leader_rank) == (2, False)
    asyncio.run(rollout.update_weights(gathered()))
    assert taken == ["a", "b"]


def test_unsupported_verl_calls_are_refused_by_name(config: Any, pushable: ServerProcess) -> None:
    from verl.workers.config import RolloutConfig

    rollout = adapter.rollout_class()(config, None, None)
    for arguments, remedy in (
        ({"wire_format": "delta_flush"}, "checkpoint_engine.backend"),
        ({"peft_config": {"r": 8}}, "merge=True"),
    ):
        with pytest.raises(adapter.NotServed, match=remedy):
            asyncio.run(rollout.update_weights(iter(()), **arguments))
    server = adapter.Server(config, 0)
    with pytest.raises(adapter.NotServed, match="images"):
        asyncio.run(server.generate([1], {}, "r", image_data=[object()]))
    with pytest.raises(TltClientError, match="tempo"):
        asyncio.run(server.generate([1], {"tempo": 1}, "r"))
    with pytest.raises(adapter.NotServed, match="one for each replica"):
        adapter.Server(config, 1)
    for wrong in ({}, {"tlt": {"urls": []}}, {"tlt": {"url": "http://x"}}):
        with pytest.raises(adapter.NotServed, match="urls must list"):
            adapter.VerlSettings.of(RolloutConfig(name="tlt", engine_kwargs=wrong))


def test_checkpoint_engine_workers_of_verl_push_weights(
    config: Any, pushable: ServerProcess
) -> None:
    """Workers get the rollout by its hook, so that verl's own table of rollouts stays as it is."""
    replica = adapter.replica_class()(replica_rank=0, config=config, model_config=None)
    workers = replica.get_ray_class_with_init_args()
    if not INSTALLED:
        assert isinstance(workers().instance.server_adapter, adapter.rollout_class())
        return
    import ray
    from verl.single_controller.ray import RayResourcePool, RayWorkerGroup

    group = RayWorkerGroup(
        resource_pool=RayResourcePool([1], use_gpu=False, max_colocate_count=1),
        ray_cls_with_init=workers,
        bin_pack=False,
        name_prefix="tlt",
        use_gpu=False,
        device_name="cpu",
    )
    sent = weights(8)
    ray.get(
        [
            worker.__ray_call__.remote(lambda self: self.checkpoint_engine.send_weights(iter(sent)))
            for worker in group.workers
        ]
    )
    ray.get(group.update_weights(global_steps=8))
    with Client(pushable.url, timeout_s=30) as client:
        live, mine = client.weight_checksums(), sums(sent)
        assert {name: live[name] for name in mine} == mine
        assert client.weights()["target"].endswith("-8")
