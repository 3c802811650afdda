"""Two networks change places: addresses stay with whoever is resident, values go with their network."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.triton_tests import DEVICE

# isort: split
from tlt_server.models.gpu import exchange as module
from tlt_server.models.gpu.exchange import compile_exchange, exchange


class Network:
    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        fused = torch.randn(14, 2, 5, generator=generator)
        shapes = [torch.randn(37, 9, generator=generator), torch.randn(3, generator=generator), fused[:7], fused[7:],
                  torch.randn(1, 1000, generator=generator).to(torch.bfloat16), torch.arange(5) + seed]
        self.tensors = [tensor.to(DEVICE) for tensor in shapes]

    def storage(self) -> list[Tensor]:
        return self.tensors


def check(resident: Network, other: Network) -> None:
    values = [[tensor.clone() for tensor in network.storage()] for network in (resident, other)]
    addresses = [[tensor.data_ptr() for tensor in network.storage()] for network in (resident, other)]
    exchange(resident, other)
    for network, said, lies in ((resident, values[0], addresses[1]), (other, values[1], addresses[0])):
        assert [tensor.data_ptr() for tensor in network.storage()] == lies
        assert all(torch.equal(tensor, was) for tensor, was in zip(network.storage(), said, strict=True))
    exchange(other, other)
    assert all(torch.equal(tensor, was) for tensor, was in zip(other.storage(), values[1], strict=True))


def test_values_go_and_addresses_stay() -> None:
    check(Network(1), Network(2))


@pytest.mark.parametrize("tile_bytes", [1, 64, 2**20])
def test_between_devices_they_go_tile_by_tile(tile_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TILE_BYTES", tile_bytes)
    monkeypatch.setattr(module, "swap", module._through_tiles)
    check(Network(1), Network(2))


def test_to_compile_it_changes_nothing() -> None:
    network = Network(1)
    before = [tensor.clone() for tensor in network.storage()]
    compile_exchange(network)
    assert all(torch.equal(tensor, was) for tensor, was in zip(network.storage(), before, strict=True))
