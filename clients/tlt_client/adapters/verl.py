"""verl: the rollout backend `tlt`, which uses running servers instead of engines that verl starts.

Call `register()` in every process of verl, from a module that VERL_USE_EXTERNAL_MODULES names. Set
`actor_rollout_ref.rollout.name=tlt`, and `rollout.engine_kwargs.tlt` to the fields of
`VerlSettings`. Three classes replace verl's: `Server` is the actor that verl's clients call,
`replica_class()` the RolloutReplica that starts it, `rollout_class()` the BaseRollout that pushes
weights to it. A version is named RUN-STEP, so every token has the global step of its weights.
"""

from __future__ import annotations

import asyncio
import functools
import os
import secrets
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tlt_client.adapters.errors import NotServed, choices_of
from tlt_client.async_client import AsyncClient
from tlt_client.channels import Sender
from tlt_client.channels.disk import DiskSender
from tlt_client.channels.http import HttpSender
from tlt_client.client import Client

NAME = "tlt"
TEXT_ONLY = (  # sampling parameters without effect on tokens
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
)


@dataclass(frozen=True)
class VerlSettings:
    """The fields of `rollout.engine_kwargs.tlt`."""

    urls: tuple[str, ...]  # one per server; replica i has the i-th
    weight_root: str = ""  # the servers' weight root, if workers see it; empty: push by http
    in_flight: str = "continue"  # what becomes of started requests when weights come
    api_key_file: str = ""

    @classmethod
    def of(cls, config: Any) -> VerlSettings:
        """Return the settings of a RolloutConfig."""
        given = dict((config.engine_kwargs or {}).get(NAME) or {})
        unknown = sorted(given.keys() - cls.__dataclass_fields__.keys())
        if unknown or not given.get("urls"):
            raise NotServed(
                f"rollout.engine_kwargs.{NAME} has {sorted(given) or 'nothing'}; urls must list at "
                f"least one server, and the known fields are {', '.join(cls.__dataclass_fields__)}"
            )
        return cls(**{**given, "urls": tuple(given["urls"])})

    def url(self, replica_rank: int) -> str:
        if not 0 <= replica_rank < len(self.urls):
            raise NotServed(
                f"there is no server for replica {replica_rank}; rollout.engine_kwargs.{NAME}.urls "
                f"lists {len(self.urls)}: list one for each replica"
            )
        return self.urls[replica_rank].rstrip("/")

    def api_key(self) -> str | None:
        return Path(self.api_key_file).read_text().strip() if self.api_key_file else None

    def sender(self, url: str) -> Sender:
        client = Client(url, api_key=self.api_key())
        return DiskSender(client, self.weight_root) if self.weight_root else HttpSender(client)


def register(name: str = NAME) -> None:
    """Register the backend with verl."""
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    RolloutReplicaRegistry.register(name, replica_class)


class Server:
    """Actor of one replica: translates verl's calls for its server. Calls may overlap."""

    def __init__(self, config: Any, replica_rank: int) -> None:
        settings = VerlSettings.of(config)
        self._client = AsyncClient(settings.url(replica_rank), api_key=settings.api_key())
        self._config = config
        self._max_len = 0  # prompt plus output; known after `launch`
        self._rejecting = False

    async def launch(self) -> None:
        """Return once the server has answered."""
        self._max_len = (await self._client.server_info())["engine"]["max_model_len"]

    async def generate(
        self,
        prompt_ids: Any,
        sampling_params: Mapping[str, Any],
        request_id: str,
        image_data: Any = None,
        video_data: Any = None,
        audio_data: Any = None,
        mm_processor_kwargs: Any = None,
    ) -> Any:
        """Return a TokenOutput. Its `stop_reason` is "aborted" if verl must ask again with the
        present tokens, else "completed".
        """
        from verl.workers.rollout.replica import TokenOutput

        if any(data is not None for data in (image_data, video_data, audio_data)):
            raise NotServed(
                "the request has images, video or audio, but this server generates from text "
                "alone; leave them out"
            )
        if self._rejecting:
            return TokenOutput(
                token_ids=[],
                stop_reason="aborted",
                extra_fields={"global_steps": await self._live_step()},
            )
        tokens = [int(token) for token in prompt_ids]
        reply = await self._client.generate(
            [{"id": request_id, "token_ids": tokens, **_seeded(sampling_params)}],
            sampling=self._sampling(sampling_params, len(tokens)),
        )
        (result,) = reply.results
        (choice,) = choices_of(result)
        steps = [_step(span.version) for span in choice.weight_versions] or [
            await self._live_step()
        ]
        figures = {
            "global_steps": steps[-1],
            "min_global_steps": steps[0],
            "max_global_steps": steps[-1],
            "num_cached_tokens": reply.usage.cached_tokens,
            "spec_num_draft_tokens": choice.sd.drafted,
            "spec_num_accepted_tokens": choice.sd.accepted,
            "spec_num_verify_steps": choice.sd.draft_steps,
        }
        return TokenOutput(
            token_ids=choice.token_ids,
            log_probs=choice.logprobs,
            extra_fields=figures,
            stop_reason="aborted" if choice.finish_reason == "abort" else "completed",
        )

    async def _live_step(self) -> int | None:
        return _step((await self._client.server_info())["engine"]["weight_version"])

    def _sampling(self, asked: Mapping[str, Any], prompt: int) -> dict[str, Any]:
        """Return the server's sampling fields; defaults are those of verl's configuration. The
        server refuses unknown ones by name.
        """
        own = {
            name: value
            for name, value in asked.items()
            if name not in (*TEXT_ONLY, "logprobs", "seed", "max_new_tokens")
        }
        wanted = asked.get("max_tokens", asked.get("max_new_tokens"))
        if wanted is None:
            wanted = min(
                self._config.response_length,
                self._config.prompt_length + self._config.response_length - prompt,
            )
        own = {
            "ignore_eos": self._config.ignore_eos,
            "repetition_penalty": self._config.repetition_penalty,
        } | own
        return own | {
            "max_tokens": max(1, min(wanted, self._max_len - prompt)),
            "top_k": max(0, asked.get("top_k") or 0),
        }

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        """End running requests with their present tokens. New ones wait until `resume_generation`;
        with `reject_request` they are aborted too.
        """
        self._rejecting = reject_request
        await self._client.pause("abort")

    async def resume_generation(self) -> None:
        self._rejecting = False
        await self._client.resume()

    async def abort_request(self, request_id: str) -> None:
        await self._client.abort(request_id)

    async def clear_kv_cache(self) -> None:
        await self._client.clear_cache()

    async def sleep(self) -> None:
        """Do nothing: verl would not wake the server before its next request."""

    async def wake_up(self) -> None:
        """Do nothing: `sleep` does nothing."""

    async def release_kv_cache(self) -> None:
        if self._config.free_cache_engine:
            await self._client.sleep("kv_cache")

    async def resume_kv_cache(self) -> None:
        if self._config.free_cache_engine:
            await self._client.wake("kv_cache")

    async def start_profile(self, **asked: Any) -> None:
        raise NotServed(
            "this server has no profiler; leave rollout.profiler out, and read its figures at GET "
            "/metrics"
        )


@functools.cache
def replica_class() -> type[Any]:
    from verl.workers.rollout.replica import RolloutReplica

    class TltReplica(RolloutReplica):
        """Replica of one server, at the URL of its rank, for trainers whose rollouts have their own
        resources (mode standalone).
        """

        async def launch_servers(self) -> None:
            import ray

            url = VerlSettings.of(self.config).url(self.replica_rank)
            server = (
                ray.remote(Server)
                .options(max_concurrency=self.max_concurrency)
                .remote(self.config, self.replica_rank)
            )
            await server.launch.remote()
            self.servers = [server]
            self._server_handle, self._server_address = server, url.partition("://")[2]

        def get_ray_class_with_init_args(self) -> Any:
            """Return the workers that get weights from verl's checkpoint engine."""
            import ray
            from verl.checkpoint_engine.base import CheckpointEngineWorker
            from verl.single_controller.ray import RayClassWithInitArgs

            class TltWorker(CheckpointEngineWorker):
                def __init__(
                    self, rollout_config: Any, model_config: Any, replica_rank: int
                ) -> None:
                    rollout = rollout_class()(rollout_config, model_config, None, replica_rank)
                    super().__init__(rollout_config, model_config, rollout)

            return RayClassWithInitArgs(
                cls=ray.remote(TltWorker),
                rollout_config=self.config,
                model_config=self.model_config,
                replica_rank=self.replica_rank,
            )

    return TltReplica


class WorkerRollout:
    """Rollout in each worker of a replica; the first worker pushes, the others help to gather the
    tensors. verl's base class follows in the MRO (`rollout_class`).
    """

    config: Any

    def __init__(
        self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1
    ) -> None:
        super().__init__(config, model_config, device_mesh)  # type: ignore[call-arg]
        settings, rank = VerlSettings.of(self.config), int(os.environ["RANK"])
        size = (
            config.tensor_model_parallel_size
            * config.data_parallel_size
            * config.pipeline_model_parallel_size
        )
        self.replica_rank = rank // size if replica_rank == -1 else replica_rank
        self.is_leader_rank = rank % size == 0
        self._settings, self._run = settings, f"verl-{secrets.token_hex(4)}"
        self._url, self._pushes = settings.url(self.replica_rank), 0
        self._sender = settings.sender(self._url)

    async def resume(self, tags: list[str]) -> None:
        if self.is_leader_rank and self.config.free_cache_engine:
            async with AsyncClient(self._url, api_key=self._settings.api_key()) as client:
                await client.wake(*tags)

    async def release(self) -> None:
        if self.is_leader_rank and self.config.free_cache_engine:
            async with AsyncClient(self._url, api_key=self._settings.api_key()) as client:
                await client.sleep()

    async def update_weights(
        self,
        weights: Any,
        global_steps: int | None = None,
        wire_format: str = "named_tensors",
        peft_config: Any = None,
        **kwargs: Any,
    ) -> None:
        """Push and return once the weights are live. Any failure raises and changes nothing."""
        if wire_format != "named_tensors":
            raise NotServed(
                f"wire_format is {wire_format!r}, but this server takes whole tensors; set "
                "rollout.checkpoint_engine.backend to one that sends them, such as nccl"
            )
        if peft_config is not None:
            raise NotServed(
                "the weights are a LoRA adapter's, which this rollout does not push yet; set "
                "model.lora.merge=True"
            )
        tensors = _in_thread(weights, asyncio.get_running_loop())
        if not self.is_leader_rank:
            await asyncio.to_thread(_exhaust, tensors)
            return
        self._pushes += 1
        step = self._pushes if global_steps is None else global_steps
        version = f"{self._run}.{self._pushes}-{step}"
        await asyncio.to_thread(
            self._sender.push, tensors, version, in_flight=self._settings.in_flight
        )


@functools.cache
def rollout_class() -> type[Any]:
    from verl.workers.rollout.base import BaseRollout

    return type("TltRollout", (WorkerRollout, BaseRollout), {})


def _in_thread(weights: Any, loop: asyncio.AbstractEventLoop) -> Iterator[tuple[str, Any]]:
    """Yield tensors one by one to another thread, while an asynchronous generator runs in `loop`.
    They are copies, because verl reuses its buffers.
    """
    if not hasattr(weights, "__aiter__"):
        for name, tensor in weights:
            yield name, tensor.detach().clone()
        return
    iterator: AsyncIterator[tuple[str, Any]] = aiter(weights)

    async def following() -> tuple[str, Any] | None:
        return await anext(iterator, None)

    while (item := asyncio.run_coroutine_threadsafe(following(), loop).result()) is not None:
        yield item[0], item[1].detach().clone()


def _exhaust(tensors: Iterator[Any]) -> None:
    for _ in tensors:
        pass


def _seeded(asked: Mapping[str, Any]) -> dict[str, int]:
    return {} if asked.get("seed") is None else {"seed": asked["seed"]}


def _step(version: str) -> int | None:
    """Return the global step in the name of a version pushed by verl."""
    step = version.rpartition("-")[2] if version.startswith("verl-") else ""
    return int(step) if step.isdecimal() else None
