"""The choice of what is left to the device: made once, from the settings, from what torch sees and
from the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from tests.unit.test_gpu_memory import CONFIG
from tlt_server.engine.devices import choice
from tlt_server.engine.devices.choice import DeviceChoice, Gpu, choose
from tlt_server.engine.devices.training import OtherGpu
from tlt_server.engine.settings import EngineSettings
from tlt_server.errors import StartupError
from tlt_server.models.loader import own_dtype
from tlt_server.process.machine import named_twice

CARD = Gpu("Card 9000", (9, 0), 70 * 2**30, 80 * 2**30)
NONE = Gpu(unusable="torch finds no GPU")


def unread() -> str:
    raise AssertionError("the checkpoint is read without need")


def chosen(
    gpu: Gpu = CARD, own: Callable[[], str] = lambda: "bfloat16", **settings: object
) -> DeviceChoice:
    files = SimpleNamespace(dtype=own, config=lambda: CONFIG)
    return choose(EngineSettings(model="m", **settings), gpu, files)  # type: ignore[arg-type]


def test_auto_device_is_the_gpu_with_a_reason() -> None:
    found, reasons = chosen(device=None)
    assert (found.device, found.dtype, found.attention, found.graphs) == (
        "cuda",
        "bfloat16",
        "triton",
        True,
    )
    assert (found.max_running, found.max_rows, found.kv_memory_mb) == (256, 4096, None)
    assert reasons == {
        "device": "cuda: torch sees Card 9000, 81920 MiB, compute capability 9.0",
        "dtype": "bfloat16: as the checkpoint",
    }


@pytest.mark.parametrize("device", [None, "cpu"])
def test_auto_device_without_a_gpu_is_the_cpu(device: str | None) -> None:
    found, reasons = chosen(NONE, unread, device=device)
    assert (found.device, found.dtype, found.attention, found.graphs) == (
        "cpu",
        "float32",
        "cpu",
        False,
    )
    assert (found.max_running, found.max_rows, found.kv_memory_mb) == (64, 512, 1024)
    assert reasons == ({"device": "cpu: torch finds no GPU"} if device is None else {})


def test_unused_gpu_is_not_mentioned() -> None:
    assert chosen(CARD, unread, device="cpu") == chosen(NONE, unread, device="cpu")


@pytest.mark.parametrize(
    ("own", "dtype"), [("bfloat16", "bfloat16"), ("float16", "float16"), ("float32", "bfloat16")]
)
def test_auto_dtype_is_the_checkpoints_own_half_precision(own: str, dtype: str) -> None:
    found, reasons = chosen(own=lambda: own, device="cuda")
    assert found.dtype == dtype
    assert reasons["dtype"].startswith(f"{dtype}: ")
    assert own == dtype or own in reasons["dtype"]


def test_explicit_device_settings_are_kept() -> None:
    asked = {
        "dtype": "float32",
        "attention": "triton",
        "max_running": 8,
        "max_rows": 100,
        "kv_memory_mb": 77,
        "graphs": False,
    }
    found, reasons = chosen(CARD, unread, device="cuda", **asked)
    assert {name: getattr(found, name) for name in asked} == asked and reasons == {}


def test_attention_that_waits_for_the_device_is_not_captured() -> None:
    found, reasons = chosen(device="cuda", attention="torch")
    assert not found.graphs and reasons["graphs"].startswith("off: attention torch")
    assert "graphs" not in chosen(device="cuda", attention="torch", graphs=False).reasons


@pytest.mark.parametrize(
    ("settings", "gpu", "says"),
    [
        (
            {"device": "cuda"},
            NONE,
            "device is cuda, but torch finds no GPU; start with --device cpu",
        ),
        (
            {"device": "cuda"},
            CARD._replace(unusable="Triton is not installed"),
            "but Triton is not installed",
        ),
        (
            {"device": "cpu", "dtype": "bfloat16"},
            CARD,
            "dtype is bfloat16, and a CPU computes in float32; use auto",
        ),
        ({"device": None, "dtype": "float16"}, NONE, "dtype is float16"),
        (
            {"device": "cpu", "attention": "flash_attn"},
            CARD,
            "attention is 'flash_attn', which needs a GPU (device cuda); use auto, cpu or torch",
        ),
        (
            {"device": None, "attention": "triton"},
            NONE,
            "attention is 'triton', which needs a GPU (device cuda); use auto, cpu or torch",
        ),
        (
            {"device": "cpu", "attention": "foo"},
            CARD,
            "attention is 'foo', which no device has; use auto, cpu or torch",
        ),
        (
            {"device": "cuda", "attention": "cpu"},
            CARD,
            "attention is 'cpu', which needs a CPU (device cpu); "
            "use auto, triton, torch or flash_attn",
        ),
        ({"device": "tpu"}, CARD, "device is 'tpu'; it must be auto, cpu or cuda"),
        (
            {"device": "cuda", "attention": "flash_attn", "kv_cache_dtype": "fp8_e4m3"},
            CARD,
            "kv_cache_dtype is fp8_e4m3 and attention is flash_attn, which reads no scales; use "
            "attention triton, or kv_cache_dtype auto",
        ),
    ],
)
def test_unavailable_device_settings_are_refused(
    settings: dict[str, str | None], gpu: Gpu, says: str
) -> None:
    with pytest.raises(StartupError) as caught:
        chosen(gpu, **settings)
    assert says in caught.value.message


def test_startup_line_summarises_the_resolved_devices() -> None:
    told = chosen(
        CARD._replace(unusable="Card 9000 has compute capability 7.5, and the kernels need 9.0"),
        device=None,
    ).describe()
    assert told == (
        "cpu, float32, attention cpu, up to 64 sequences | "
        "device cpu: Card 9000 has compute capability 7.5, and the kernels need 9.0"
    )


class TestWhatTorchSees:
    @pytest.fixture(autouse=True)
    def card(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Card 9000")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (70 * 2**30, 80 * 2**30))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(choice, "mps_enabled", lambda: False)
        monkeypatch.setattr(choice, "find_spec", lambda name: name)

    def test_usable_gpu_is_described(self) -> None:
        assert choice.look() == CARD

    def test_several_gpus_and_mps_are_described(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Properties:
            name, total_memory = "Card 9000", 80 * 2**30

        monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: Properties)
        monkeypatch.setattr(choice, "mps_enabled", lambda: True)
        others = tuple(OtherGpu(number, "Card 9000", 80 * 2**30) for number in (1, 2))
        assert choice.look() == CARD._replace(mps=True, others=others)

    def test_torch_without_cuda_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.version, "cuda", None)
        assert choice.look() == Gpu(unusable="this torch is built without CUDA")

    def test_missing_gpu_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert choice.look() == NONE

    def test_failing_gpu_driver_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fails() -> str:
            raise RuntimeError("CUDA error: no device\nCompile with TORCH_USE_CUDA_DSA")

        monkeypatch.setattr(torch.cuda, "get_device_name", fails)
        assert choice.look().unusable == "torch cannot use the GPU (CUDA error: no device)"

    def test_gpu_below_compute_capability_9_is_unusable(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
        assert (
            choice.look().unusable
            == "Card 9000 has compute capability 7.5, and the kernels need 9.0"
        )

    def test_old_gpu_is_left_alone_or_refused_before_a_launch(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Kernels begin with instructions that only newer ones have."""
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
        old = "Card 9000 has compute capability 8.9, and the kernels need 9.0"
        told = chosen(choice.look(), unread, device=None).describe()
        assert told == f"cpu, float32, attention cpu, up to 64 sequences | device cpu: {old}"
        with pytest.raises(StartupError) as caught:
            chosen(choice.look(), unread, device="cuda")
        remedy = "start with --device cpu, or check the machine with tlt doctor"
        assert caught.value.message == f"device is cuda, but {old}; {remedy}"

    @pytest.mark.parametrize("asked", [None, "cuda"])
    def test_gpu_named_twice_is_refused(
        self, asked: str | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Torch sees no GPU at all then, and auto must not mean the CPU."""
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,0")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        with pytest.raises(StartupError) as caught:
            chosen(choice.look(), unread, device=asked, tensor_parallel=2)
        assert caught.value.message == (
            "CUDA_VISIBLE_DEVICES names GPU 0 twice; name each GPU once, or start with --device cpu"
        )
        assert chosen(choice.look(), unread, device="cpu").settings.device == "cpu"

    def test_missing_triton_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(choice, "find_spec", lambda name: None)
        assert "Triton" in choice.look().unusable


@pytest.mark.parametrize(
    ("visible", "twice"),
    [
        ("", ""),
        ("0", ""),
        ("1,10,0", ""),
        ("0,1, 0", "0"),
        ("2,02", "02"),
        ("0,-1,0", ""),  # only the first is visible
        ("GPU-8932f937,GPU-a1", ""),
        ("GPU-8932f937-d72c,GPU-a1,GPU-8932F937", "GPU-8932F937"),
        ("MIG-1,GPU-1,MIG-1", "MIG-1"),
    ],
)
def test_repeated_gpus_in_cuda_visible_devices_are_found(visible: str, twice: str) -> None:
    assert named_twice(visible) == twice


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_checkpoint_dtype_is_read_from_its_header(dtype: torch.dtype, tmp_path: Path) -> None:
    weights = {
        "model.embed_tokens.weight": torch.zeros(4, 2, dtype=dtype),
        "a.norm": torch.zeros(4),
    }
    save_file(weights, tmp_path / "model.safetensors")
    assert f"torch.{own_dtype(tmp_path)}" == str(dtype)
