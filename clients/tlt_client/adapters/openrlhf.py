"""OpenRLHF: an actor with the methods that its trainer calls on a vLLM actor, for a server that is
already running.

    actor = ray.remote(RolloutActor).options(max_concurrency=1000)
    engines = [actor.remote("http://10.0.0.1:8000")]

No tensor passes through the actor: the server itself is the rank `rank_offset` of the trainer's
group, and each `update_weight` names the tensor that rank 0 broadcasts next. The server gathers the
tensors; the call with the model's last one makes all of them live.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass
from typing import Any

from tlt_client.adapters.errors import NotServed, choices_of
from tlt_client.async_client import AsyncClient
from tlt_client.channels.groups import Membership, WeightGroup, host_store
from tlt_client.wire import VersionSpan

SAMPLING = (  # fields that vLLM's SamplingParams and the server name alike
    "temperature",
    "top_p",
    "min_p",
    "max_tokens",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
)


@dataclass(frozen=True)
class Logprob:
    logprob: float


@dataclass(frozen=True)
class CompletionOutput:
    """The fields of vLLM's CompletionOutput that OpenRLHF reads, and the weight versions."""

    token_ids: list[int]
    text: str
    logprobs: list[dict[int, Logprob]] | None  # one per token; None if they were not asked for
    finish_reason: str
    weight_versions: list[VersionSpan]
    index: int = 0


@dataclass(frozen=True)
class RequestOutput:
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]


class RolloutActor:
    """Actor of one server. Calls may overlap, as in an asyncio actor of Ray."""

    def __init__(
        self, url: str, *, api_key: str | None = None, executor: Any = None, run: str = ""
    ) -> None:
        """`executor`: OpenRLHF's AgentExecutor for `generate_responses`; without it a
        SingleTurnAgentExecutor. `run`: versions are named RUN-1, RUN-2, ...; empty: a random one.
        """
        self._client = AsyncClient(url, api_key=api_key)
        self._executor, self._run = executor, run or f"openrlhf-{secrets.token_hex(4)}"
        self._group, self._pushes, self._unfinished = "", 0, 0

    # weights

    async def init_process_group(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str,
        use_ray: bool,
    ) -> None:
        """Join the trainer's group; return once all ranks have. Over nccl it is the communicator of
        OpenRLHF 0.11, which is vLLM's. Over gloo it is one of torch's named groups.
        """
        if use_ray:
            raise NotServed(
                "use_ray is true, and this server joins no groups of Ray; leave "
                "--vllm.sync_with_ray out"
            )
        await self._client.join_group(
            group_name,
            master_address=master_address,
            master_port=int(master_port),
            rank_offset=rank_offset,
            world_size=world_size,
            backend=backend,
            prefixed=backend != "nccl",
        )
        self._group = group_name

    async def update_weight(
        self, name: str, dtype: Any, shape: Any, empty_cache: bool = False
    ) -> str:
        """Let the server receive one tensor, which rank 0 broadcasts at the same time. Return the
        push's state: gathering, or committed after the last tensor.
        """
        entry = {"name": name, "dtype": str(dtype).removeprefix("torch."), "shape": list(shape)}
        reply = await self._client.push_weights(
            f"{self._run}-{self._pushes + 1}",
            channel="broadcast",
            group=self._group,
            tensors=[entry],
            packed=False,
            partial=True,
        )
        state: str = reply["state"]
        if state != "gathering":
            self._pushes += 1
        elif empty_cache:
            raise NotServed(
                f"{name!r} is the trainer's last tensor, but others of the model are missing; "
                "push all of its parameters"
            )
        return state

    async def update_weight_cuda_ipc(self, *args: Any, **kwargs: Any) -> None:
        raise NotServed(
            "update_weight_cuda_ipc carries handles as pickles, which this server does not read; "
            "leave --train.colocate_all out, or set --vllm.sync_backend gloo and make a "
            "TrainerGroup: then weights are broadcast"
        )

    # pause, sleep

    async def reset_prefix_cache(self) -> None:
        await self._client.clear_cache()

    async def pause_generation(self) -> None:
        """Freeze running sequences with their KV; new requests wait."""
        await self._client.pause("continue")

    async def resume_generation(self) -> None:
        await self._client.resume()

    async def sleep(self, level: int = 1) -> None:
        """Free the KV's memory; at level 2 also the weights'."""
        await self._client.sleep(*(("kv_cache",) if level == 1 else ("kv_cache", "weights")))

    async def wake_up(self, tags: list[str] | None = None) -> None:
        await self._client.wake(*(tags or ()))

    # generation

    async def generate(
        self, prompt_token_ids: list[int], sampling_params: Any, multi_modal_data: Any = None
    ) -> RequestOutput:
        """Generate one choice. `sampling_params` has the fields of vLLM's SamplingParams."""
        if multi_modal_data:
            raise NotServed(
                f"multi_modal_data holds {sorted(multi_modal_data)}, but this server generates "
                "from text alone; leave it out"
            )
        if getattr(sampling_params, "n", 1) != 1:
            raise NotServed(
                f"n is {sampling_params.n}, but this call returns one choice; call it once for "
                "each choice"
            )
        self._unfinished += 1
        try:
            reply = await self._client.generate(
                [{"token_ids": list(prompt_token_ids), **_seeded(sampling_params)}],
                sampling=_sampling(sampling_params),
            )
        finally:
            self._unfinished -= 1
        (result,) = reply.results
        (choice,) = choices_of(result)
        asked = getattr(sampling_params, "logprobs", None) is not None
        logprobs = (
            [
                {token: Logprob(logprob)}
                for token, logprob in zip(choice.token_ids, choice.logprobs, strict=True)
            ]
            if asked
            else None
        )
        return RequestOutput(
            list(prompt_token_ids),
            [
                CompletionOutput(
                    choice.token_ids,
                    choice.text or "",
                    logprobs,
                    choice.finish_reason,
                    choice.weight_versions,
                )
            ],
        )

    async def generate_responses(
        self,
        prompt: str,
        label: str,
        sampling_params: Any,
        max_length: int,
        hf_tokenizer: Any,
        num_samples: int = 1,
        images: Any = None,
    ) -> list[Any]:
        """Return the results of OpenRLHF's executor for `num_samples` runs of the prompt; each run
        calls `generate`.
        """
        if self._executor is None:
            from openrlhf.utils.agent import SingleTurnAgentExecutor

            self._executor = SingleTurnAgentExecutor(None)
        return await asyncio.gather(
            *(
                self._executor.execute(
                    prompt=prompt,
                    label=label,
                    sampling_params=sampling_params,
                    max_length=max_length,
                    hf_tokenizer=hf_tokenizer,
                    llm_engine=self,
                    images=images,
                )
                for _ in range(num_samples)
            )
        )

    def get_num_unfinished_requests(self) -> int:
        return self._unfinished


class TrainerGroup:
    """Rank 0 of the group. It replaces the communicator that OpenRLHF 0.11 makes by
    `stateless_init_process_group`, and has its `broadcast`, for machines without NCCL.
    """

    def __init__(
        self,
        master_address: str,
        master_port: int,
        world_size: int,
        *,
        group_name: str = "openrlhf",
        backend: str = "gloo",
        timeout_s: float = 120.0,
    ) -> None:
        """Make the group and return once all ranks have joined; ask the actors to join first."""
        store = host_store(master_address, master_port, world_size, timeout_s)
        member = Membership(
            group_name,
            backend,
            master_address,
            master_port,
            0,
            world_size,
            backend != "nccl",
            timeout_s,
        )
        self._group = WeightGroup(member, store)

    def broadcast(self, tensor: Any, src: int = 0, stream: Any = None) -> None:
        """Broadcast from this rank; return once it is done, so `stream` has no effect."""
        self._group.end(self._group.begin(tensor.detach().to(self._group.device).contiguous()))

    def close(self) -> None:
        self._group.close()


def _seeded(asked: Any) -> dict[str, int]:
    seed = getattr(asked, "seed", None)
    return {} if seed is None else {"seed": seed}


def _sampling(asked: Any) -> dict[str, Any]:
    """Return the server's sampling fields. Fields that only affect text (`detokenize`, ...) are
    left out, as they have no effect on tokens.
    """
    given = {name: getattr(asked, name, None) for name in SAMPLING}
    top_k = getattr(asked, "top_k", None) or 0
    return {name: value for name, value in given.items() if value is not None} | {
        "top_k": max(0, top_k),
        "max_tokens": given["max_tokens"],
    }
