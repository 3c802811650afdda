"""Weights from GPU to GPU: by ipc within one, by nccl between two; what is live is bit for bit what
the trainer, this process, has sent.
"""

import asyncio
import base64
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tests.e2e.gloo_trainer import free_port
from tests.e2e.test_on_gpu import FEW
from tests.e2e.trainers import Calls
from tests.nccl_id import written
from tlt_client import Client, ServerError
from tlt_client.adapters.openrlhf import RolloutActor, TrainerGroup
from tlt_client.channels import broadcast
from tlt_client.channels.broadcast import BroadcastSender
from tlt_client.channels.checksums import mix64
from tlt_client.channels.errors import ChannelError
from tlt_client.channels.ipc import IpcSender
from tlt_client.channels.nccl import KEY, Communicator, new_id
from tlt_client.channels.tensors import buckets, spec_of
from tlt_server.demo.server import ServerProcess
from tlt_server.demo.workload import TARGET

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")

HOST, LIMIT = "127.0.0.1", timedelta(seconds=30)
FLAGS = (
    "--device",
    "cuda",
    "--model",
    str(TARGET),
    *FEW,
    "--weight-channels",
    "ipc,broadcast",
    "--weight-timeout-s",
    "10",
)
DIES = """
import sys, threading
from safetensors.torch import load_file
from tlt_client import Client
from tlt_client.channels.ipc import IpcSender

class Dying(IpcSender):
    def _offer(self, line, memory, sequence, start, size):
        if sequence == 3:
            print("sent", flush=True)
            threading.Event().wait()
        super()._offer(line, memory, sequence, start, size)

tensors = load_file(sys.argv[2])
sender = Dying(Client(sys.argv[1]), bucket_bytes=2**16)
sender.push(((name, tensor.cuda()) for name, tensor in tensors.items()), "dies")
"""


def weights(seed: int) -> dict[str, Tensor]:
    """Return tensors on this process's first GPU, in the type they are served in."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (tensor.float() + 0.01 * torch.randn(tensor.shape, generator=generator)).to(
            "cuda", torch.bfloat16
        )
        for name, tensor in load_file(TARGET / "model.safetensors").items()
    }


def sums(tensors: dict[str, Tensor]) -> dict[str, str]:
    return {name: mix64(tensor) for name, tensor in tensors.items()}


def live(client: Client) -> dict[str, str]:
    return {
        name: value
        for name, value in client.weight_checksums().items()
        if not name.startswith("draft.")
    }


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """Start a server on this process's first GPU."""
    with ServerProcess(*FLAGS) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[Client]:
    with Client(server.url, timeout_s=100) as client:
        yield client


@pytest.fixture(scope="module")
def second_server() -> Iterator[ServerProcess]:
    """Start a server on the second GPU."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[1] if visible else "1"
    try:
        server = ServerProcess(*FLAGS)
        server.__enter__()
    finally:
        if visible is None:
            del os.environ["CUDA_VISIBLE_DEVICES"]
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible
    yield server
    server.stop()


@pytest.fixture(scope="module")
def beside(second_server: ServerProcess) -> Iterator[Client]:
    with Client(second_server.url, timeout_s=100) as client:
        yield client


@pytest.mark.parametrize("bucket_bytes", [1, 2**18, 2**28])
def test_weights_pushed_by_ipc_are_active_bit_for_bit(bucket_bytes: int, client: Client) -> None:
    tensors = weights(bucket_bytes % 97)
    assert live(client) != sums(tensors)
    reply = IpcSender(client, bucket_bytes=bucket_bytes).push(
        tensors.items(), f"ipc-{bucket_bytes}"
    )
    assert reply["state"] == "committed" and live(client) == sums(tensors)


def test_trainer_on_the_cpu_pushes_to_an_engine_on_a_gpu(client: Client) -> None:
    tensors = {name: tensor.cpu() for name, tensor in weights(5).items()}
    assert IpcSender(client).push(tensors.items(), "cpu")["state"] == "committed"
    assert live(client) == sums(tensors)


def test_gpu_bytes_unlike_their_checksum_are_refused(client: Client) -> None:
    class Flipping(IpcSender):
        def _offer(self, line: Any, memory: Any, sequence: int, start: int, size: int) -> None:
            memory.view[start + size // 2] ^= 1
            torch.cuda.synchronize()
            super()._offer(line, memory, sequence, start, size)

    before = live(client)
    with pytest.raises(ServerError, match="checksum"):
        Flipping(client, checksums=True).push(weights(6).items(), "flipped")
    assert live(client) == before


def test_memory_beyond_the_trainers_allocation_is_not_read(client: Client) -> None:
    class Boasting(IpcSender):
        def _send(self, line: Any, memory: Any, cut: Any, held: Any) -> None:
            line.send(
                memory.grant._replace(size=2 * memory.grant.size).packed(), memory.descriptors
            )
            line.receive(8)

    before = live(client)
    with pytest.raises(ServerError, match="grant no more than is allocated"):
        Boasting(client).push(weights(8).items(), "boasting")
    assert live(client) == before
    tensors = weights(9)
    assert IpcSender(client).push(tensors.items(), "modest")["state"] == "committed"
    assert live(client) == sums(tensors)


def test_trainer_killed_with_open_memory_leaves_engine_unchanged(
    server: ServerProcess, client: Client
) -> None:
    before = live(client)
    arguments = [sys.executable, "-c", DIES, server.url, str(TARGET / "model.safetensors")]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as dying:
        assert dying.stdout is not None and dying.stdout.readline() == "sent\n"
        dying.send_signal(signal.SIGKILL)
    for _ in range(600):
        if not client.weights()["open"]:
            break
        threading.Event().wait(0.05)
    assert live(client) == before
    tensors = weights(7)
    assert IpcSender(client).push(tensors.items(), "after")["state"] == "committed"
    assert live(client) == sums(tensors)


def test_nccl_on_one_gpu_is_refused_naming_a_channel_that_works(client: Client) -> None:
    with pytest.raises((ChannelError, ServerError), match="on one GPU push by ipc"):
        BroadcastSender(client, backend="nccl", timeout_s=20)
    assert client.weights()["groups"] == []


class ToAll:
    rootRank = 0  # noqa: N815


def test_single_rank_communicator_broadcasts_to_itself() -> None:
    communicator = Communicator(new_id(), 0, 1, torch.device("cuda", 0), 20.0)
    data = torch.arange(1000, device="cuda")
    work = communicator.broadcast([data], ToAll())
    work.wait(LIMIT)
    assert work.is_completed() and data.tolist() == list(range(1000))
    communicator.abort()


def test_nccl_join_without_peers_times_out() -> None:
    with pytest.raises(RuntimeError, match="waited for 1 s"):
        Communicator(new_id(), 0, 2, torch.device("cuda", 0), 1.0)


@two_gpus
@pytest.mark.parametrize(
    "fields", [{}, {"packed": False}, {"bucket_bytes": 2**18}, {"prefixed": True}], ids=str
)
def test_weights_pushed_by_nccl_are_active_bit_for_bit(
    fields: dict[str, Any], beside: Client
) -> None:
    sender = BroadcastSender(beside, backend="nccl", timeout_s=30, **fields)
    for seed in (11, 12):
        tensors = weights(seed)
        reply = sender.push(tensors.items(), f"{fields} {seed}")
        assert reply["state"] == "committed" and live(beside) == sums(tensors)
    sender.close()


@two_gpus
@pytest.mark.parametrize("way", ["store", "id"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_trainer_of_vllm_pushes_by_nccl(
    way: str, packed: bool, second_server: ServerProcess, beside: Client
) -> None:
    """Rank 0 meets the server in a store that has the id as vLLM's trainers write it, or by the id
    itself.
    """
    tensors, id, limit = weights(21 + packed), new_id(), 2**18
    info: dict[str, Any] = {
        "rank_offset": 1,
        "world_size": 2,
        "packed": packed,
        "packed_buffer_size_bytes": limit,
    }
    if way == "store":
        store = TCPStore(HOST, 0, 2, True, LIMIT, wait_for_workers=False)
        store.set(KEY, written(id))
        info |= {"master_address": HOST, "master_port": store.port}
    else:
        info |= {"nccl_unique_id_b64": base64.b64encode(id).decode()}
    calls = Calls(second_server.url)
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(calls.post, "/init_weight_transfer_engine", {"init_info": info})
        communicator = Communicator(id, 0, 2, torch.device("cuda", 0), 30.0)
        joined.result()
        described = {
            "names": list(tensors),
            "dtype_names": ["bfloat16"] * len(tensors),
            "shapes": [list(tensor.shape) for tensor in tensors.values()],
        }
        reply = pool.submit(
            calls.post,
            "/update_weights",
            {"update_info": described, "weight_version": f"{way} {packed}"},
        )
        specs = [spec_of(name, "bfloat16", tensor.shape) for name, tensor in tensors.items()]
        for bucket in buckets(specs, limit if packed else None):
            data = torch.cat(
                [tensors[piece.name].reshape(-1).view(torch.uint8) for piece in bucket]
            )
            communicator.broadcast([data], ToAll()).wait(LIMIT)
        assert reply.result()["state"] == "committed"
    assert live(beside) == sums(tensors)
    communicator.abort()


@two_gpus
def test_silent_rank_0_delays_no_request_and_blocks_sleep(
    second_server: ServerProcess, beside: Client
) -> None:
    sender = BroadcastSender(beside, backend="nccl", timeout_s=20, bucket_bytes=2**16)
    entries = [
        {"name": name, "dtype": "bfloat16", "shape": list(tensor.shape)}
        for name, tensor in weights(1).items()
    ]
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(
            beside.push_weights,
            "silent too",
            channel="broadcast",
            group="weights",
            tensors=entries,
            bucket_bytes=2**16,
        )
        for _ in range(600):
            if beside.weights()["open"].get("state") == "staging":
                break
            threading.Event().wait(0.01)
        threading.Event().wait(0.5)  # its kernel is there
        with Client(second_server.url, timeout_s=5) as other:
            for seed in range(3):  # batches of other shapes, whose graphs are not there yet
                asked = [{"prompt": f"{i}+{seed}=", "seed": seed} for i in range(1 + 5 * seed)]
                assert len(
                    other.generate(asked, sampling={"max_tokens": 8, "top_p": 0.9}).results
                ) == len(asked)
            refused = httpx.post(f"{second_server.url}/sleep?level=1", timeout=5)
            assert refused.status_code == 409 and "through the GPU" in refused.text
        assert not reply.done()
        with pytest.raises(ServerError, match="make the group"):
            reply.result()
    sender.close()


@two_gpus
def test_trainer_gives_up_a_server_that_does_not_receive(
    beside: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broadcast, "GRACE_S", 1.0)
    sender = BroadcastSender(beside, backend="nccl", timeout_s=3)
    never = threading.Event()
    monkeypatch.setattr(
        sender, "_client", SimpleNamespace(push_weights=lambda *given, **fields: never.wait())
    )
    more_than_nccl_buffers = torch.zeros(2**29, dtype=torch.bfloat16, device="cuda")
    with pytest.raises(ChannelError, match="make the group again, then push"):
        sender.push([("w", more_than_nccl_buffers)], "never")
    never.set()
    torch.cuda.synchronize()  # its kernel is gone
    tensors = weights(15)
    assert (
        BroadcastSender(beside, backend="nccl").push(tensors.items(), "at last")["state"]
        == "committed"
    )
    assert live(beside) == sums(tensors)


@two_gpus
def test_openrlhf_call_order_works_over_nccl(second_server: ServerProcess, beside: Client) -> None:
    """Join the communicator that the trainer makes; the actor gets each parameter's name before
    rank 0 broadcasts it.
    """
    tensors, states = weights(31), list[str]()

    async def pushed() -> None:
        actor, port = RolloutActor(second_server.url), free_port()
        joined = asyncio.ensure_future(
            actor.init_process_group(HOST, port, 1, 2, "openrlhf", backend="nccl", use_ray=False)
        )
        group = await asyncio.to_thread(TrainerGroup, HOST, port, 2, backend="nccl", timeout_s=30)
        await joined
        for name, tensor in tensors.items():
            asked = asyncio.ensure_future(
                actor.update_weight(name, dtype=tensor.dtype, shape=tensor.shape)
            )
            await asyncio.to_thread(group.broadcast, tensor)
            states.append(await asked)
        group.close()

    asyncio.run(pushed())
    assert states == ["gathering"] * (len(tensors) - 1) + ["committed"]
    assert live(beside) == sums(tensors)


@two_gpus
def test_silent_rank_0_times_out_and_the_engine_survives(beside: Client) -> None:
    before = live(beside)
    sender = BroadcastSender(beside, backend="nccl", timeout_s=3, bucket_bytes=2**16)
    entries = [
        {"name": name, "dtype": "bfloat16", "shape": list(tensor.shape)}
        for name, tensor in weights(1).items()
    ]
    with pytest.raises(ServerError, match="make the group"):
        beside.push_weights(
            "silent", channel="broadcast", group="weights", tensors=entries, bucket_bytes=2**16
        )
    assert live(beside) == before
    sender.close()
    tensors = weights(13)
    reply = BroadcastSender(beside, backend="nccl").push(tensors.items(), "again")
    assert reply["state"] == "committed" and live(beside) == sums(tensors)
