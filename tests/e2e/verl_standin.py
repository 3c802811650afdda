"""The part of verl 0.9.1 and of ray that the adapter uses, for an environment without them: names,
parameters and defaults are those of that release, read from its source; what the methods do is as
little as the adapter needs. Actors live in this process.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any


@dataclass
class RolloutConfig:
    """Fields of `verl.workers.config.RolloutConfig`."""

    name: str
    prompt_length: int = 512
    response_length: int = 512
    ignore_eos: bool = False
    repetition_penalty: float = 1.0
    free_cache_engine: bool = True
    data_parallel_size: int = 1
    tensor_model_parallel_size: int = 2
    pipeline_model_parallel_size: int = 1
    max_num_seqs: int = 1024
    engine_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass
class TokenOutput:
    token_ids: list[int]
    log_probs: list[float] | None = None
    routed_experts: Any | None = None
    stop_reason: str | None = None
    num_preempted: int | None = None
    extra_fields: dict[str, Any] = field(default_factory=dict)


class RolloutReplica(ABC):
    def __init__(
        self,
        replica_rank: int,
        config: Any,
        model_config: Any,
        gpus_per_node: int = 8,
        is_reward_model: bool = False,
        is_teacher_model: bool = False,
        name_suffix: str = "",
    ) -> None:
        self.replica_rank, self.config, self.model_config = replica_rank, config, model_config
        self.servers: list[Any] = []
        self._server_address: Any = None
        self._server_handle: Any = None

    @abstractmethod
    async def launch_servers(self) -> None: ...

    @property
    def server_address(self) -> str:
        address: str = self._server_address
        return address

    @property
    def server_handle(self) -> Any:
        return self._server_handle

    @property
    def max_concurrency(self) -> int:
        concurrency: int = max(1000, self.config.max_num_seqs + 16)
        return concurrency

    async def _all(self, method: str, **arguments: Any) -> None:
        await asyncio.gather(
            *(getattr(server, method).remote(**arguments) for server in self.servers)
        )

    async def sleep(self) -> None:
        await self._all("sleep")

    async def wake_up(self) -> None:
        await self._all("wake_up")

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        await self._all("abort_all_requests", reject_request=reject_request)

    async def resume_generation(self) -> None:
        await self._all("resume_generation")

    async def clear_kv_cache(self) -> None:
        await self._all("clear_kv_cache")

    async def release_kv_cache(self) -> None:
        await self._all("release_kv_cache")

    async def resume_kv_cache(self) -> None:
        await self._all("resume_kv_cache")


class RolloutReplicaRegistry:
    _registry: dict[str, Callable[[], type[RolloutReplica]]] = {}

    @classmethod
    def register(cls, name: str, loader: Callable[[], type[RolloutReplica]]) -> None:
        cls._registry[name] = loader

    @classmethod
    def get(cls, name: str) -> type[RolloutReplica]:
        return cls._registry[name]()


class BaseRollout(ABC):
    def __init__(
        self, config: Any, model_config: Any, device_mesh: Any, *args: Any, **kwargs: Any
    ) -> None:
        self.config, self.model_config, self.device_mesh = config, model_config, device_mesh

    @abstractmethod
    async def resume(self, tags: list[str]) -> None: ...

    @abstractmethod
    async def update_weights(
        self, weights: Any, wire_format: str = "named_tensors", **kwargs: Any
    ) -> None: ...

    @abstractmethod
    async def release(self) -> None: ...


class CheckpointEngineWorker:
    def __init__(
        self,
        rollout_config: Any,
        model_config: Any,
        server_adapter: BaseRollout | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        assert server_adapter is not None, (
            "without one verl looks the rollout up in a table of its own"
        )
        self.server_adapter = server_adapter


class RayClassWithInitArgs:
    def __init__(self, cls: Any, *args: Any, **kwargs: Any) -> None:
        self.cls, self.args, self.kwargs = cls, args, kwargs

    def __call__(self) -> Any:
        return self.cls.remote(*self.args, **self.kwargs)


class Method:
    def __init__(self, bound: Callable[..., Coroutine[Any, Any, Any]]) -> None:
        self._bound = bound

    def remote(self, *args: Any, **kwargs: Any) -> asyncio.Task[Any]:
        return asyncio.create_task(self._bound(*args, **kwargs))


class Handle:
    def __init__(self, instance: Any) -> None:
        self.instance = instance

    def __getattr__(self, name: str) -> Method:
        return Method(getattr(self.instance, name))


class Actor:
    def __init__(self, cls: type[Any]) -> None:
        self._cls = cls

    def options(self, *, max_concurrency: int) -> Actor:
        return self

    def remote(self, *args: Any, **kwargs: Any) -> Handle:
        return Handle(self._cls(*args, **kwargs))


CONTENT: dict[str, dict[str, Any]] = {
    "ray": {"remote": Actor},
    "verl": {},
    "verl.workers": {},
    "verl.workers.rollout": {},
    "verl.workers.config": {"RolloutConfig": RolloutConfig},
    "verl.workers.rollout.replica": {
        "RolloutReplica": RolloutReplica,
        "RolloutReplicaRegistry": RolloutReplicaRegistry,
        "TokenOutput": TokenOutput,
    },
    "verl.workers.rollout.base": {"BaseRollout": BaseRollout},
    "verl.checkpoint_engine": {},
    "verl.checkpoint_engine.base": {"CheckpointEngineWorker": CheckpointEngineWorker},
    "verl.single_controller": {},
    "verl.single_controller.ray": {"RayClassWithInitArgs": RayClassWithInitArgs},
}


def modules() -> dict[str, ModuleType]:
    made = {}
    for name, content in CONTENT.items():
        made[name] = ModuleType(name)
        made[name].__dict__.update(content)
    return made
