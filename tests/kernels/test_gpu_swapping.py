"""Swap of two networks: addresses stay with the resident network, values go with theirs."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from tests.kernels.triton_tests import DEVICE, gpu

# isort: split
from triton import knobs

from tlt_kernels.gpu import swap as kernels
from tlt_server.models.config import ModelConfig
from tlt_server.models.gpu import swapping as module
from tlt_server.models.gpu.decoder import GpuDecoder
from tlt_server.models.gpu.matmuls import StrictMatmuls
from tlt_server.models.gpu.placement import Placement
from tlt_server.models.gpu.swapping import compile_swaps, swap_networks


class Network:
    """A network in which some sizes and addresses are no multiple of what a vector access takes."""

    def __init__(self, seed: int, *, pinned: bool = False) -> None:
        generator = torch.Generator().manual_seed(seed)
        whole = [
            torch.randn(37, 9, generator=generator),
            torch.randn(3, generator=generator),
            torch.randn(14, 2, 5, generator=generator),
            torch.randn(1, 1000, generator=generator).to(torch.bfloat16),
            torch.arange(5) + seed,
        ]
        first, second, fused, *rest = [
            tensor.pin_memory() if pinned else tensor.to(DEVICE) for tensor in whole
        ]
        self.tensors = [first, second, fused[:7], fused[7:], *rest]

    def storage(self) -> list[Tensor]:
        return self.tensors


def check(resident: Network, other: Network) -> None:
    values = [[tensor.clone() for tensor in network.storage()] for network in (resident, other)]
    addresses = [
        [tensor.data_ptr() for tensor in network.storage()] for network in (resident, other)
    ]
    swap_networks(resident, other)
    for network, said, lies in (
        (resident, values[0], addresses[1]),
        (other, values[1], addresses[0]),
    ):
        assert [tensor.data_ptr() for tensor in network.storage()] == lies
        assert all(
            torch.equal(tensor.cpu(), was.cpu())
            for tensor, was in zip(network.storage(), said, strict=True)
        )
    swap_networks(other, other)
    assert all(
        torch.equal(tensor.cpu(), was.cpu())
        for tensor, was in zip(other.storage(), values[1], strict=True)
    )


def test_weight_swap_exchanges_the_storage_of_two_networks() -> None:
    check(Network(1), Network(2))


@pytest.mark.parametrize("tile_bytes", [1, 64, 2**20])
def test_weights_swap_between_devices_tile_by_tile(
    tile_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TILE_BYTES", tile_bytes)
    monkeypatch.setattr(
        module, "swap", lambda pairs: [module._through_tiles(*pair) for pair in pairs]
    )
    check(Network(1), Network(2))


@gpu
@pytest.mark.parametrize("tile_bytes", [64, 2**20])
def test_weights_swap_with_pinned_memory_tile_by_tile(
    tile_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(pairs: list[tuple[Tensor, Tensor]]) -> None:
        assert not pairs, "one kernel cannot reach both"

    monkeypatch.setattr(module, "TILE_BYTES", tile_bytes)
    monkeypatch.setattr(module, "swap", never)
    resident, staged = Network(1), Network(2, pinned=True)
    assert resident.storage()[0].is_cuda and staged.storage()[0].is_pinned()
    check(resident, staged)
    assert resident.storage()[0].is_pinned()
    assert staged.storage()[0].is_cuda, "addresses change hands"


def test_every_swapped_pair_uses_a_precompiled_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare by what tells kernels apart."""
    asked: list[tuple[int, bool]] = []
    monkeypatch.setattr(
        module, "swap", lambda pairs: asked.extend(kernels.variant(*pair) for pair in pairs)
    )
    compile_swaps(Network(1))
    compiled = set(asked)
    assert compiled == {(4, True), (4, False), (2, True), (8, True)}
    assert len(asked) == len(compiled), "each once"
    asked.clear()
    swap_networks(Network(1), Network(2))
    assert set(asked) == compiled


@gpu
def test_weight_swap_compiles_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare by what Triton compiles."""
    compiled: list[str] = []
    monkeypatch.setattr(
        knobs.runtime, "jit_cache_hook", lambda **call: compiled.append(call["repr"]) and None
    )
    for kernel in kernels._KERNELS.values():
        kernel.device_caches.clear()
    compile_swaps(Network(1))
    assert len(compiled) == 4
    swap_networks(Network(1), Network(2))
    torch.cuda.synchronize()
    assert len(compiled) == 4, compiled[4:]


def test_compiling_swap_kernels_changes_no_weight() -> None:
    network = Network(1)
    before = [tensor.clone() for tensor in network.storage()]
    compile_swaps(network)
    assert all(
        torch.equal(tensor, was) for tensor, was in zip(network.storage(), before, strict=True)
    )


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["Qwen2ForCausalLM", "Qwen3ForCausalLM", "LlamaForCausalLM"])
def test_target_storage_lists_each_parameter_once(family: str, tied: bool) -> None:
    raw = {"architectures": [family], "vocab_size": 64, "hidden_size": 32, "head_dim": 16}
    raw |= {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2}
    raw |= {"intermediate_size": 48, "rms_norm_eps": 1e-6, "max_position_embeddings": 8}
    config = ModelConfig.parse(raw | {"tie_word_embeddings": tied}, family)
    placement = Placement(torch.device(DEVICE), torch.float32, StrictMatmuls())
    model = GpuDecoder(config, placement=placement)
    stored, parameters = model.storage(), model.own_parameters().values()
    places = sorted((each.data_ptr(), each.data_ptr() + each.nbytes) for each in stored)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(places))
    for each in parameters:
        start, end = each.data_ptr(), each.data_ptr() + each.nbytes
        assert any(first <= start and end <= last for first, last in places)
    assert sum(each.nbytes for each in stored) == sum(each.nbytes for each in parameters)
    assert len(stored) < len(parameters), "fused maps are whole"
