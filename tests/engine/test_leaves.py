"""The leaves of long sums: one tree of additions, which the fingerprint names."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest
import torch

from tests.engine.test_strict_numerics import CONFIG, TOKENS
from tests.rows_of_one import Sequence
from tlt_kernels import versions
from tlt_server.engine.cpu.device import of_cpu
from tlt_server.engine.devices.choice import Gpu, ModelFacts, choose
from tlt_server.engine.devices.training import OtherGpu
from tlt_server.engine.gpu.device import of_gpu
from tlt_server.engine.settings import EngineSettings
from tlt_server.errors import StartupError
from tlt_server.models.config import ModelConfig
from tlt_server.models.decoder import Decoder
from tlt_server.models.numerics import Numerics
from tlt_server.models.split import Split, check_leaves, folded
from tlt_server.wire.fingerprint import Fingerprint

# Each eighth of K has weights of this order of magnitude.
EXPONENTS = (0, 17, 5, 11, 22, 19, 2, 14)
# Version and leaves -> hash of the sums; `tlt_kernels.versions` is raised when these change.
GOLDEN = {(1, 2): "6aba12ecfe6d9cdb", (1, 4): "5cffa6e62022edba", (1, 8): "49f4ece1efd04cf2"}


def factors() -> tuple[torch.Tensor, torch.Tensor]:
    """Whole numbers whose sum over an eighth of K is exact in any order, and over all of K is
    not.
    """
    generator = torch.Generator().manual_seed(0)
    x_RK = torch.randint(-8, 9, (4, 64), generator=generator).float()
    w_KN = torch.randint(-8, 9, (64, 16), generator=generator).float()
    return x_RK, w_KN * 2.0 ** torch.tensor(EXPONENTS).repeat_interleave(8)[:, None]


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()[:16]


@pytest.mark.parametrize("leaves", [2, 4, 8])
def test_sums_have_their_golden_bits(leaves: int) -> None:
    """Leaves of an eighth are exact on every processor, so the bits are those of the tree."""
    x_RK, w_KN = factors()
    eighths = [x @ w for x, w in zip(x_RK.chunk(8, 1), w_KN.chunk(8), strict=True)]
    if leaves < 8:  # leaves that are exact, too: every other eighth is zero
        w_KN = w_KN.clone()
        for j in range(8):
            w_KN[8 * j : 8 * j + 8] *= j % (8 // leaves) == 0
    found_RN = Numerics("strict").sum_of_leaves(x_RK, w_KN, leaves)
    assert digest(found_RN) == GOLDEN[versions.CPU, leaves]
    if leaves == 8:
        in_turn = eighths[0]
        for eighth in eighths[1:]:
            in_turn = in_turn + eighth
        assert digest(in_turn) != GOLDEN[versions.CPU, 8], "another order is not noticed"


def logits(leaves: int) -> torch.Tensor:
    model = Decoder(CONFIG, numerics=Numerics("strict"), split=Split(leaves))
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters().values():
        parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.06)
    model.self_test()
    hidden_RH = Sequence(model, capacity=160).extend(TOKENS).hidden_RH
    return model.logits(hidden_RH)


def test_two_leaves_differ_from_one_leaf_only_by_rounding() -> None:
    one, two = logits(1), logits(2)
    assert not torch.equal(one, two)
    torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4)


def test_reduction_tree_adds_neighbours() -> None:
    parts = [torch.tensor([value]) for value in (1.0, 1e8, -1e8, 1.0)]
    assert folded(parts).item() == 0, "one after the other they give 1"
    assert folded(parts[:1]) is parts[0]


WIDE = replace(CONFIG, heads=28, kv_heads=4, head_dim=128, intermediate_size=18944)  # as 7B
PAIR = replace(CONFIG, heads=2, kv_heads=1, head_dim=128, intermediate_size=512)  # as the demo's


def test_leaves_splitting_a_head_are_refused_naming_valid_ones() -> None:
    check_leaves(WIDE, 4, 128, "m")
    with pytest.raises(StartupError, match="reduction_leaves is 8 .*28 heads .* use 1 or 2 or 4$"):
        check_leaves(WIDE, 8, 128, "m")
    with pytest.raises(StartupError, match="use 2 or 4$"):
        check_leaves(WIDE, 8, 128, "m", ranks=2)


@pytest.mark.parametrize(
    ("config", "flags", "why"),
    [
        (WIDE, {"tensor_parallel": 3}, "use 1 or 2 or 4$"),
        (WIDE, {"tensor_parallel": 8}, "use 1 or 2 or 4$"),
        (replace(WIDE, intermediate_size=18960), {"tensor_parallel": 8}, "use 1 or 2$"),
        (WIDE, {"tensor_parallel": 4, "reduction_leaves": 2}, "use 4$"),
        (WIDE, {"reduction_leaves": 3}, "use 1 or 2 or 4$"),
        (PAIR, {"tensor_parallel": 2, "reduction_leaves": 1}, "use 2$"),
        (PAIR, {"tensor_parallel": 8}, "use 1 or 2$"),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_leaves_foreign_to_the_model_are_refused_at_once(
    config: ModelConfig, flags: dict[str, int], why: str, device: str
) -> None:
    """Each number that is named works: no second refusal follows."""
    settings = EngineSettings(model="m", device=device, **flags)  # type: ignore[arg-type]
    gpus = CARD._replace(others=tuple(TWIN._replace(number=n) for n in range(1, 8)))
    if device == "cuda" and config.intermediate_size % 128:
        why = "use 1$"
    with pytest.raises(StartupError, match=why):
        choose(settings, gpus, files(config))


def test_too_few_gpus_are_refused_naming_valid_widths() -> None:
    settings = EngineSettings(model="m", device="cuda", tensor_parallel=4)  # type: ignore[arg-type]
    with pytest.raises(StartupError, match="sees 2 GPUs, .*; use 1 or 2, or name more in CUDA_"):
        choose(settings, CARD._replace(others=(TWIN,)), files(WIDE))


def files(config: ModelConfig = WIDE) -> ModelFacts:
    return SimpleNamespace(dtype=lambda: "bfloat16", config=lambda: config)


CARD = Gpu("Card 9000", (9, 0), 70 * 2**30, 80 * 2**30)
TWIN = OtherGpu(1, "Card 9000", 80 * 2**30)


@pytest.mark.parametrize(
    ("flags", "others", "why"),
    [
        ({"tensor_parallel": 2, "numerics": "fast"}, (TWIN,), "use numerics strict"),
        ({"reduction_leaves": 4, "numerics": "fast"}, (), "use numerics strict"),
        ({"reduction_leaves": 4, "max_loras": 1}, (), "use reduction_leaves 2"),
    ],
)
def test_invalid_ranks_and_leaves_on_gpus_are_refused(
    flags: dict[str, object], others: tuple[OtherGpu, ...], why: str
) -> None:
    settings = EngineSettings(model="m", device="cuda", **flags)  # type: ignore[arg-type]
    with pytest.raises(StartupError, match=why):
        choose(settings, CARD._replace(others=others), files())


@pytest.mark.parametrize(
    ("heads", "flags", "leaves"),
    [
        (28, {}, 4),
        (28, {"tensor_parallel": 2}, 4),
        (28, {"tensor_parallel": 4}, 4),
        (14, {}, 2),  # four would cut a head
        (28, {"max_loras": 1}, 2),
        (28, {"numerics": "fast"}, 2),
        (28, {"reduction_leaves": 2}, 2),
    ],
)
def test_auto_leaves_on_gpus_are_four_unless_a_head_is_cut(
    heads: int, flags: dict[str, object], leaves: int
) -> None:
    model = files(replace(WIDE, heads=heads, kv_heads=2))
    settings = EngineSettings(model="m", device="cuda", **flags)  # type: ignore[arg-type]
    others = tuple(TWIN._replace(number=number) for number in (1, 2, 3))
    found = choose(settings, CARD._replace(others=others), model).settings
    assert found.reduction_leaves == leaves


def test_auto_staging_of_several_ranks_stays_on_the_device() -> None:
    for ranks, staging in ((1, None), (2, "device")):
        settings = EngineSettings(model="m", device="cpu", tensor_parallel=ranks)  # type: ignore[arg-type]
        assert choose(settings, Gpu(), files()).settings.weight_staging == staging


def test_auto_leaves_on_a_cpu_equal_the_ranks() -> None:
    for ranks in (1, 2):
        settings = EngineSettings(model="m", device="cpu", tensor_parallel=ranks)  # type: ignore[arg-type]
        assert choose(settings, Gpu(), files()).settings.reduction_leaves == ranks


@pytest.mark.parametrize("name", Fingerprint.__struct_fields__)
def test_fingerprint_difference_names_field_and_both_values(name: str) -> None:
    mine = Fingerprint(2, "float32", "x", "strict 1", "cpu")
    assert mine.difference(mine) == ""
    other = msgspec.structs.replace(mine, **{name: 1})
    assert mine.difference(other) == f"{name} is {getattr(mine, name)!r} here and 1 there"


def test_the_fingerprint_names_the_attention_of_each_device() -> None:
    for device, attention in (("cpu", "cpu"), ("cpu", "torch"), ("cuda", "torch")):
        settings = EngineSettings(model="m", device=device, attention=attention)  # type: ignore[arg-type]
        decided = choose(settings, CARD, files()).settings
        found = (
            of_cpu(decided, Numerics()) if device == "cpu" else of_gpu(decided, torch.device("cpu"))
        )
        assert found.attention == attention


def test_fingerprint_names_the_target_processor_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """MKL may add in one order on both, and their vectors have other widths."""
    settings = choose(EngineSettings(model="m", device="cpu"), CARD, files()).settings  # type: ignore[arg-type]
    found = []
    for name in ("icelake-server", "znver4"):
        monkeypatch.setenv("NUMBA_CPU_NAME", name)
        found.append(of_cpu(settings, Numerics()))
        assert name in found[-1].architecture
    assert found[0].difference(found[1]).startswith("architecture is ")
