"""A trainer in a process of its own, for the end-to-end tests: rank 0 of a gloo group that is made
as trainers make theirs which drive vLLM (a group straight upon a TCPStore) or SGLang (torch's
rendezvous, a prefix, torch's helper for named groups).

`train` makes the calls of one of `ORDERS` once per seed, and returns for each round what the
trainer has broadcast and what the server says is live, as checksums by tensor, and the version that
is live.
"""

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, distributed
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from tests.e2e.trainers import Calls
from tlt_client.channels.checksums import mix64
from tlt_server.demo.workload import DRAFTER, TARGET

HOST, LIMIT = "127.0.0.1", timedelta(seconds=60)
BUCKET = 2**20
Named = list[tuple[str, Tensor]]


def weights(seed: int, source: Any = TARGET, prefix: str = "") -> Named:
    """Return tensors as `named_parameters` gives them after a step."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            prefix + name,
            tensor + 0.01 * torch.randn(tensor.shape, generator=generator)
            if tensor.is_floating_point()
            else tensor,
        )
        for name, tensor in load_file(source / "model.safetensors").items()
    ]


def sums(named: Named) -> dict[str, str]:
    return {name: mix64(tensor) for name, tensor in named if tensor.is_floating_point()}


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        port: int = taken.getsockname()[1]
        return port


def chunks(named: Named, count: int) -> list[Named]:
    size = -(-len(named) // count)
    return [named[i : i + size] for i in range(0, len(named), size)]


def packed(named: Named, limit: int) -> Iterator[Tensor]:
    """Raw bytes in buckets; a bucket closes after the tensor that takes it over the limit."""
    bucket: list[Tensor] = []
    for _, tensor in named:
        bucket.append(tensor.reshape(-1).view(torch.uint8))
        if sum(len(part) for part in bucket) > limit:
            yield torch.cat(bucket)
            bucket = []
    if bucket:
        yield torch.cat(bucket)


def named_group(port: int, name: str, world: int = 2) -> Any:
    """Join a group by torch's rendezvous, a prefix, and torch's helper for named groups."""
    groups = distributed.distributed_c10d
    place = f"tcp://{HOST}:{port}"
    store, rank, size = next(distributed.rendezvous(place, 0, world, timeout=LIMIT))  # type: ignore[attr-defined]
    store.set_timeout(LIMIT)
    group, _ = groups._new_process_group_helper(  # type: ignore[no-untyped-call]
        size,
        rank,
        [],
        groups.Backend("gloo"),
        PrefixStore(name, store),
        group_name=name,
        timeout=LIMIT,
    )
    groups._world.pg_group_ranks[group] = {rank: rank for rank in range(world)}
    return group


class Trainer:
    def __init__(self, url: str) -> None:
        self.calls, self._pool = Calls(url), ThreadPoolExecutor(1)
        self.rounds: list[dict[str, Any]] = []
        self.world: int = 1 + self.calls.get("/get_world_size")["world_size"]

    def meanwhile(self, path: str, body: object, own: Callable[[], Any]) -> tuple[Any, Any]:
        """A call that the server answers once this process has done its part."""
        reply = self._pool.submit(self.calls.post, path, body)
        done = own()
        return reply.result(), done

    # as trainers that drive vLLM

    def join_as_vllm(self, path: str, body: Callable[[int, int], dict[str, Any]]) -> None:
        port = free_port()

        def join() -> Any:
            store = TCPStore(HOST, port, self.world, True, LIMIT)
            return distributed.ProcessGroupGloo(store, 0, self.world, LIMIT)  # type: ignore[call-arg, arg-type]

        _, self.group = self.meanwhile(path, body(port, self.world), join)

    def send_to_vllm(
        self,
        path: str,
        body: Callable[[Any], dict[str, Any]],
        pushes: list[Named],
        *,
        limit: int | None = None,
        listed: bool = False,
    ) -> Any:
        infos = [
            {
                "names": [name for name, _ in named],
                "dtype_names": [str(t.dtype).removeprefix("torch.") for _, t in named],
                "shapes": [list(t.shape) for _, t in named],
            }
            for named in pushes
        ]

        def send() -> None:
            for named in pushes:
                for tensor in (
                    packed(named, limit) if limit is not None else (tensor for _, tensor in named)
                ):
                    self.group.broadcast(tensor, 0).wait()

        return self.meanwhile(path, body(infos if listed else infos[0]), send)[0]

    # as trainers that drive SGLang

    def join_as_sglang(self, name: str, **fields: Any) -> None:
        port = free_port()
        asked = {
            "master_address": HOST,
            "master_port": str(port),
            "rank_offset": 1,
            "world_size": self.world,
            "group_name": name,
            "backend": "gloo",
        }
        reply, self.group = self.meanwhile(
            "/init_weights_update_group", asked, lambda: named_group(port, name, self.world)
        )
        assert reply["success"]

    def send_to_sglang(self, name: str, named: Named, **fields: Any) -> Any:
        asked = {
            "names": [name for name, _ in named],
            "dtypes": [str(tensor.dtype) for _, tensor in named],
            "shapes": [list(tensor.shape) for _, tensor in named],
            "group_name": name,
            **fields,
        }

        def send() -> None:
            tensors = (
                packed(named, 2**40) if "load_format" in fields else [tensor for _, tensor in named]
            )
            for work in [
                distributed.broadcast(tensor, 0, group=self.group, async_op=True)
                for tensor in tensors
            ]:
                work.wait()

        return self.meanwhile("/update_weights_from_distributed", asked, send)[0]

    def version(self) -> str:
        version: str = self.calls.get("/weight_info")["weight_version"]
        return version

    def tell(self, sent: Named) -> None:
        live = self.calls.post("/weight_checker", {"action": "checksum"})["checksums"]
        mine = sums(sent)
        found = {name: live.get(name) for name in mine}
        self.rounds.append({"version": self.version(), "mine": mine, "live": found})


def init_info(port: int, world: int, **fields: Any) -> dict[str, Any]:
    return {
        "init_info": {
            "master_address": HOST,
            "master_port": port,
            "rank_offset": 1,
            "world_size": world,
            "backend": "gloo",
            **fields,
        }
    }


def trl(trainer: Trainer, seeds: list[int]) -> None:
    """Freeze what runs; in a session one call names everything, and tensors come one by one."""
    assert (
        trainer.calls.get("/server_info?config_format=json")["vllm_config"][
            "weight_transfer_config"
        ]["backend"]
        == "gloo"
    )
    trainer.join_as_vllm("/init_weight_transfer_engine", init_info)
    for seed in seeds:
        sent, before = weights(seed), trainer.version()
        trainer.calls.post("/pause?mode=keep")
        trainer.calls.post("/start_weight_update", {"is_checkpoint_format": True})
        reply = trainer.send_to_vllm("/update_weights", lambda info: {"update_info": info}, [sent])
        assert reply["state"] == "staged" and trainer.version() == before, (
            "not before the end of the session"
        )
        assert (
            trainer.calls.post("/finish_weight_update", {"weight_version": f"trl-{seed}"})["state"]
            == "committed"
        )
        trainer.calls.post("/resume")
        trainer.tell(sent)
        trainer.calls.await_tokens()  # rollouts go on


def art(trainer: Trainer, seeds: list[int]) -> None:
    """No session: one call lists several groups of tensors, packed, and is answered when they are
    live.
    """
    trainer.join_as_vllm(
        "/init_weight_transfer_engine",
        lambda port, world: init_info(
            port, world, packed=True, packed_buffer_size_bytes=BUCKET, packed_num_buffers=2
        ),
    )
    for seed in seeds:
        sent = weights(seed)
        reply = trainer.send_to_vllm(
            "/update_weights",
            lambda infos, seed=seed: {"update_info": infos, "weight_version": f"art-{seed}"},
            chunks(sent, 3),
            limit=BUCKET,
            listed=True,
        )
        assert reply["state"] == "committed" and reply["weight_version"] == f"art-{seed}"
        trainer.tell(sent)


def skyrl(trainer: Trainer, seeds: list[int]) -> None:
    """All by remote calls, a few tensors in each."""
    trainer.join_as_vllm("/init_weight_transfer_engine", init_info)
    for seed in seeds:
        sent, before = weights(seed), trainer.version()
        trainer.calls.post(
            "/collective_rpc",
            {"method": "skyrl_start_weight_update", "kwargs": {"is_checkpoint_format": True}},
        )
        for chunk in chunks(sent, 5):
            trainer.send_to_vllm(
                "/collective_rpc",
                lambda info: {
                    "method": "update_weights_nccl",
                    "kwargs": {"update_info": info | {"packed": True}},
                },
                [chunk],
                limit=2**30,
            )
        assert trainer.version() == before
        trainer.calls.post("/collective_rpc", {"method": "skyrl_finish_weight_update"})
        trainer.tell(sent)


def prime_rl(trainer: Trainer, seeds: list[int]) -> None:
    """The group is made with the servers' own count; target and drafter come in one stream."""
    trainer.join_as_vllm(
        "/init_broadcaster",
        lambda port, world: {
            "host": HOST,
            "port": port,
            "rank_offset": 0,
            "inference_world_size": world - 1,
            "timeout": 60,
            "backend": "gloo",
        },
    )
    for seed in seeds:
        sent = weights(seed) + weights(seed, DRAFTER, "draft.")
        trainer.calls.post("/pause")
        reply = trainer.send_to_vllm("/update_weights", lambda info: {"update_info": info}, [sent])
        assert (reply["state"], reply["role"]) == ("committed", "all")
        trainer.calls.post("/resume")
        trainer.tell(sent)


def slime(trainer: Trainer, seeds: list[int]) -> None:
    """No session: every call brings a bucket, and the last one of them makes all of it live."""
    trainer.join_as_sglang("slime-pp_0")
    for seed in seeds:
        sent, before = weights(seed), trainer.version()
        trainer.calls.post("/pause_generation", {"mode": "in_place"})
        buckets = chunks(sent, 4)
        for bucket in buckets[:-1]:
            reply = trainer.send_to_sglang(
                "slime-pp_0", bucket, weight_version=f"slime-{seed}", flush_cache=False
            )
            assert reply["message"].startswith("gathering") and trainer.version() == before
        reply = trainer.send_to_sglang(
            "slime-pp_0", buckets[-1], weight_version=f"slime-{seed}", flush_cache=False
        )
        assert reply["new_version"] == f"slime-{seed}"
        trainer.calls.post("/continue_generation", {})
        trainer.tell(sent)
        trainer.calls.await_tokens()
    assert trainer.calls.post("/destroy_weights_update_group", {"group_name": "slime-pp_0"})[
        "success"
    ]


def miles(trainer: Trainer, seeds: list[int]) -> None:
    """A session around flattened buckets, first of the target, then of the drafter."""
    trainer.join_as_sglang("miles")
    for seed in seeds:
        sent, drafter = weights(seed), weights(seed, DRAFTER)
        trainer.calls.post("/begin_weight_update", {"selector": "all"})
        for bucket in chunks(sent, 3):
            trainer.send_to_sglang("miles", bucket, load_format="flattened_bucket")
        for bucket in chunks(drafter, 2):
            trainer.send_to_sglang(
                "miles", bucket, load_format="flattened_bucket", selector="draft"
            )
        trainer.calls.post("/update_weight_version", {"new_version": f"miles-{seed}"})
        assert trainer.calls.post("/end_weight_update")["new_version"] == f"miles-{seed}"
        trainer.tell(sent + [(f"draft.{name}", tensor) for name, tensor in drafter])


def areal(trainer: Trainer, seeds: list[int]) -> None:
    """Abort what runs by the push, and make a new group each time."""
    for seed in seeds:
        trainer.join_as_sglang(f"areal-{seed}")
        sent = weights(seed)
        trainer.calls.post("/pause_generation", {})
        reply = trainer.send_to_sglang(
            f"areal-{seed}", sent, abort_all_requests=True, weight_version=f"areal-{seed}"
        )
        assert reply["message"] == f"committed: version areal-{seed}"
        trainer.calls.post("/continue_generation", {})
        trainer.tell(sent)
        trainer.calls.post("/destroy_weights_update_group", {"group_name": f"areal-{seed}"})


ORDERS = {order.__name__: order for order in (trl, art, skyrl, prime_rl, slime, miles, areal)}


def train(order: str, url: str, seeds: list[int]) -> list[dict[str, Any]]:
    trainer = Trainer(url)
    ORDERS[order](trainer, seeds)
    return trainer.rounds
