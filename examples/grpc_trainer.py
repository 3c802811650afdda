"""A trainer's steps over gRPC, asyncio: streams rollouts as they end, then sends the new weights in
parts through the same channel.

    tlt serve --model DIR --grpc-port 8001 --weight-channels http --state-dir STATE
    python examples/grpc_trainer.py 127.0.0.1:8001 DIR --steps 3

"Training" adds a little noise to the weights of DIR, so that each push differs. Needs torch and
`pip install 'tlt-client[grpc]'`.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
from collections.abc import Iterator
from pathlib import Path

import grpc
import torch
from safetensors.torch import load_file, save

from tlt_client.rpc import (
    GenerateRequest,
    Item,
    Manifest,
    Message,
    Part,
    RolloutServiceStub,
    SamplingFields,
    UpdateWeightsRequest,
)
from tlt_client.rpc.rollout_pb2 import TensorFields

PIECE_BYTES = 4 * 2**20


def parts(version: str, weights: dict[str, torch.Tensor]) -> Iterator[UpdateWeightsRequest]:
    """Yield one safetensors file in pieces, then the manifest with each tensor's checksum."""
    data = save(weights)
    for start in range(0, len(data), PIECE_BYTES):
        piece = Part(
            version=version,
            part="model.safetensors",
            start=start,
            total=len(data),
            data=data[start : start + PIECE_BYTES],
        )
        yield UpdateWeightsRequest(part=piece)
    tensors = [
        TensorFields(
            name=name,
            checksum=f"sha256:{hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy()).hexdigest()}",
        )
        for name, tensor in weights.items()
    ]
    yield UpdateWeightsRequest(manifest=Manifest(version=version, channel="http", tensors=tensors))


async def steps(address: str, model: Path, count: int) -> None:
    weights = load_file(model / "model.safetensors")
    async with grpc.aio.insecure_channel(address) as channel:
        rollouts = RolloutServiceStub(channel)
        for step in range(1, count + 1):
            items = [
                Item(
                    id=f"{a}+{step}",
                    messages=[Message(role="user", content=f"Compute {a}+{step}.")],
                    n=2,
                )
                for a in range(4)
            ]
            async for event in rollouts.Generate(
                GenerateRequest(requests=items, sampling=SamplingFields(max_tokens=60))
            ):
                if event.WhichOneof("event") == "result":
                    for choice in event.result.choices:
                        print(
                            event.result.id,
                            repr(choice.text),
                            choice.weight_versions[0].version,
                            round(sum(choice.logprobs), 2),
                        )
            weights = {
                name: tensor + 1e-6 * torch.randn_like(tensor) for name, tensor in weights.items()
            }  # here you would train
            pushed = await rollouts.UpdateWeights(parts(f"step-{step}", weights))
            print(pushed.state, pushed.weight_version, round(pushed.pause_ms, 2), "ms")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("address", help="host and port of the server's gRPC")
    parser.add_argument("model", type=Path, help="directory of the model that is served")
    parser.add_argument("--steps", type=int, default=3)
    arguments = parser.parse_args()
    asyncio.run(steps(arguments.address, arguments.model, arguments.steps))
