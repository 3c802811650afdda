"""Each check of `tlt doctor` finds the fault that is planted for it, with a remedy."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import sys
import tomllib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import trustme
from packaging.specifiers import SpecifierSet

from tlt_server.config import Config
from tlt_server.demo.workload import DRAFTER, TARGET
from tlt_server.doctor import compute, host, model, places
from tlt_server.doctor.finding import Finding, examine
from tlt_server.engine.devices import choice
from tlt_server.engine.devices.choice import Gpu
from tlt_server.models.numerics import BLOCKS
from tlt_server.weights import storage

ROOT = Path(__file__).parents[2]
GIB = 2**30


def configured(**settings: Any) -> Config:
    return (
        Config(**{"model": TARGET, "drafter": str(DRAFTER), "port": 0, "threads": 2, **settings})
        .checked()
        .resolved()
    )


def found(check: Callable[..., Finding], *arguments: Any) -> Finding:
    return examine("planted", lambda: check(*arguments))


def expect(finding: Finding, status: str, *words: str) -> None:
    assert finding.status == status, finding
    assert finding.remedy and not finding.remedy.startswith("see"), (
        "a finding that is not ok has a remedy"
    )
    for word in words:
        assert word in finding.found + finding.remedy, f"{word!r} is not in {finding}"


def expect_ok(finding: Finding, said: str) -> None:
    assert (finding.status, finding.found) == ("ok", said)


def test_a_check_that_breaks_is_a_finding() -> None:
    def breaks() -> Finding:
        raise ZeroDivisionError("of no use")

    expect(found(breaks), "fail", "ZeroDivisionError", "of no use")


def test_python(monkeypatch: pytest.MonkeyPatch) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (low, high) = host.SUPPORTED
    assert SpecifierSet(project["requires-python"]) == SpecifierSet(
        f">={low[0]}.{low[1]},<{high[0]}.{high[1]}"
    )
    monkeypatch.setattr(sys, "version_info", (3, 10, 0))
    expect(found(host.python), "fail", "Python 3.11 or 3.12")


def test_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    requires = {
        "tlt-server": ["torch>=2.11", "numpy", "flash-attn; extra == 'flash-attn'"],
        "tlt-kernels": None,
        "tlt-client": ["httpx"],
    }
    versions = {"torch": "2.13.0+cpu", "numpy": "2.4.6", "httpx": "0.28.1"}
    monkeypatch.setattr(metadata, "requires", requires.__getitem__)

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "version", version)
    assert found(host.packages).status == "ok"
    versions["torch"] = "2.3.1"
    del versions["httpx"]
    expect(
        found(host.packages),
        "fail",
        "torch is 2.3.1",
        "httpx is missing",
        "pip install 'torch>=2.11' 'httpx'",
    )


def test_locale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("locale.getpreferredencoding", lambda set: "ANSI_X3.4-1968")
    expect(found(host.locale_encoding), "warn", "ANSI", "LANG=C.UTF-8")


def test_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: "/" + "t" * 90)
    expect(found(host.sockets), "fail", "107", "TMPDIR")


def test_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 4096))
    expect(
        found(host.open_files, configured(max_connections=1024)),
        "warn",
        "1280",
        "ulimit -n 1280",
        "--max-connections to 768",
    )
    monkeypatch.setattr(
        resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    )
    assert found(host.open_files, configured()).status == "ok"


def test_processors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(host, "CPU_QUOTA", tmp_path / "cpu.max")
    assert found(host.processors, configured(threads=8)).status == "ok"
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert found(host.processors, configured(threads=8)).status == "ok"
    (tmp_path / "cpu.max").write_text("350000 100000\n")
    expect(
        found(host.processors, configured(threads=8)),
        "warn",
        "8 compute threads",
        "3.5",
        "--threads 3",
    )


def test_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    expect(found(host.libraries, configured()), "warn", "unset OMP_WAIT_POLICY")
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    assert found(host.libraries, configured()).status == "ok"


def test_api_keys(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("\n")
    expect(
        found(places.api_keys, configured(api_key_file=keys)),
        "fail",
        "holds no key",
        "one per line",
    )
    keys.write_text("secret")
    keys.chmod(0o644)
    expect(found(places.api_keys, configured(api_key_file=keys)), "warn", f"chmod 600 {keys}")
    keys.chmod(0o600)
    expect(
        found(places.api_keys, configured(api_key_file=keys)), "warn", "all scopes", "scopes=data"
    )
    keys.write_text("secret scopes=data name=trainer")
    expect_ok(found(places.api_keys, configured(api_key_file=keys)), "trainer")


def test_certificates(tmp_path: Path) -> None:
    issued, (cert, key) = (
        trustme.CA().issue_cert("127.0.0.1"),
        (tmp_path / "cert.pem", tmp_path / "key.pem"),
    )
    issued.cert_chain_pems[0].write_to_path(cert)
    settings = configured(tls_cert=cert, tls_key=key)
    expect(found(places.certificates, settings), "fail", "cannot read tls_key", "PEM file")
    issued.private_key_pem.write_to_path(key)
    key.chmod(0o644)
    expect(found(places.certificates, settings), "warn", f"chmod 600 {key}")
    key.chmod(0o600)
    expect_ok(found(places.certificates, settings), str(cert))
    expect_ok(found(places.certificates, configured()), "none: plain HTTP")


def test_weight_root(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    expect(
        found(places.weight_root, configured(weight_root=tmp_path)), "warn", f"chmod o-w {tmp_path}"
    )


def test_state_directory(tmp_path: Path) -> None:
    expect(found(places.state_directory, configured(weight_root=tmp_path)), "warn", "--state-dir")
    (tmp_path / "file").write_text("")
    expect(
        found(places.state_directory, configured(state_dir=tmp_path / "file" / "state")),
        "fail",
        "another --state-dir",
    )
    assert (
        "will be made"
        in found(places.state_directory, configured(state_dir=tmp_path / "a" / "b")).found
    )
    tmp_path.chmod(0o770)
    expect(
        found(places.state_directory, configured(state_dir=tmp_path)),
        "warn",
        f"chmod 700 {tmp_path}",
    )
    assert list(tmp_path.iterdir()) == [tmp_path / "file"], "a check changes nothing"


@pytest.mark.parametrize(("free", "status"), [(10, "fail"), (90, "warn"), (4000, "ok")])
def test_disk(free: int, status: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(GIB, GIB, free * 2**20)
    )
    finding = found(places.disk_space, configured(state_dir=tmp_path))
    assert (
        finding.status == status
        and "GiB free" in finding.found
        and bool(finding.remedy) == (status != "ok")
    )


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    """A copy of the shipped pair to break."""
    shutil.copytree(TARGET, tmp_path / "target")
    shutil.copytree(DRAFTER, tmp_path / "drafter")
    return tmp_path


def broken(pair: Path, **settings: Any) -> Config:
    return configured(model=pair / "target", drafter=str(pair / "drafter"), **settings)


def test_tokenizer(pair: Path) -> None:
    (pair / "target" / "tokenizer_config.json").write_text("{}")
    expect(found(places.tokenizer, broken(pair)), "warn", "no chat template", "chat_template")
    (pair / "target" / "tokenizer.json").write_text("{")
    expect(found(places.tokenizer, broken(pair)), "fail", "tokenizer.json")
    (pair / "target" / "tokenizer.json").unlink()
    expect(found(places.tokenizer, broken(pair)), "warn", "there is no", "save the tokenizer")


def rewrite(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_model(pair: Path) -> None:
    weights, config = pair / "target" / "model.safetensors", pair / "target" / "config.json"
    whole, described = weights.read_bytes(), config.read_text()
    assert found(model.target, broken(pair)).status == "ok"
    weights.write_bytes(whole[:-100])
    expect(
        found(model.target, broken(pair)),
        "fail",
        "not a whole safetensors file",
        "download it again",
    )
    weights.unlink()
    expect(
        found(model.target, broken(pair)),
        "fail",
        "model.safetensors",
        "is missing",
        "point to a directory",
    )
    weights.write_bytes(whole)
    rewrite(config, intermediate_size=32)
    expect(found(model.target, broken(pair)), "fail", "has shape", "do not belong together")
    config.write_text(described)
    rewrite(config, num_hidden_layers=99)
    expect(found(model.target, broken(pair)), "fail", "is missing", "incomplete")
    config.write_text(described)
    rewrite(config, architectures=["MambaForCausalLM"])
    expect(found(model.target, broken(pair)), "fail", "unknown model family 'MambaForCausalLM'")


def test_a_dtype_that_is_not_taken(pair: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = pair / "target" / "model.safetensors"
    tensors = load_file(path)
    save_file(
        {**tensors, "model.norm.weight": tensors["model.norm.weight"].to(torch.float64)}, path
    )
    expect(found(model.target, broken(pair)), "fail", "torch.float64", "convert the checkpoint")


def test_a_length_that_the_model_has_not() -> None:
    expect(
        found(model.target, configured(max_model_len=10**6)),
        "fail",
        "max_model_len 1000000 exceeds",
        "lower it",
    )


def test_drafter(pair: Path) -> None:
    config = pair / "drafter" / "config.json"
    described = config.read_text()
    assert (
        found(model.drafter, broken(pair)).status == "ok"
        and found(model.drafter, configured(drafter="history")).found == "history"
    )
    rewrite(config, hidden_size=1024)
    expect(
        found(model.drafter, broken(pair)),
        "fail",
        "'hidden_size' is 1024",
        "trained for this target",
    )
    config.write_text(described)
    rewrite(config, intermediate_size=32)
    expect(found(model.drafter, broken(pair)), "fail", "has shape")
    config.write_text(described)
    (pair / "drafter" / "model.safetensors").write_bytes(b"short")
    expect(found(model.drafter, broken(pair)), "fail", "truncated or damaged", "download it again")


def test_numerics(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "self-test passed" in found(model.numerics, configured()).found
    expect(
        found(model.numerics, configured(numerics="fast")),
        "warn",
        "exact in distribution",
        "--numerics strict",
    )
    monkeypatch.setattr(
        "tlt_server.models.numerics.Numerics._row_invariant",
        lambda self, weight, bias: self.method is BLOCKS,
    )
    expect(found(model.numerics, configured()), "warn", "padded blocks of 16 rows", "oneDNN")
    monkeypatch.setattr(
        "tlt_server.models.numerics.Numerics._row_invariant", lambda self, weight, bias: False
    )
    expect(
        found(model.numerics, configured()),
        "fail",
        "depends on the rows around it",
        "MKL_CBWR=AVX2,STRICT",
    )


@pytest.mark.parametrize(
    ("available", "total", "status"), [(100, 200, "fail"), (100, 8000, "warn"), (8000, 16000, "ok")]
)
def test_memory(
    available: int, total: int, status: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "meminfo").write_text(
        f"MemTotal: {total * 1024} kB\nMemAvailable: {available * 1024} kB\n"
    )
    monkeypatch.setattr(storage, "MEMORY", tmp_path / "meminfo")
    monkeypatch.setattr(storage, "CONTROL_GROUP", tmp_path)
    finding = found(model.memory, configured(weight_root=tmp_path))
    assert finding.status == status and "3 x 0.02 GiB" in finding.found
    for name, value in {
        "max": f"{300 * 2**20}",
        "current": "0",
        "stat": "anon 0\ninactive_file 0",
    }.items():
        (tmp_path / f"memory.{name}").write_text(f"{value}\n")
    expect(
        found(model.memory, configured(weight_root=tmp_path)), "fail", "in all", "--kv-memory-mb"
    )


def test_kv_that_holds_no_sequence() -> None:
    expect(
        found(model.memory, configured(kv_memory_mb=1)),
        "fail",
        "kv_memory_mb 1 holds",
        "raise it to",
    )


def test_committed_weights(tmp_path: Path) -> None:
    config = configured(state_dir=tmp_path)
    assert found(model.committed_weights, config).status == "ok" and not list(tmp_path.iterdir())
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "current.json").write_text(
        json.dumps({"model": "/another", "roles": {}})
    )
    expect(
        found(model.committed_weights, config),
        "fail",
        "belongs to the model /another",
        "another --state-dir",
    )


CARD = Gpu("Card 9000", (9, 0), 70 * GIB, 80 * GIB)
CLEAR = re.compile(r"(\d+) pages")


def test_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compute, "DRIVER", tmp_path / "version")
    monkeypatch.setattr(choice, "look", lambda: Gpu(unusable="this torch is built without CUDA"))
    assert found(compute.gpu) == Finding("ok", "none", check="planted"), (
        "what follows is for the check device to say"
    )
    (tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu\nGCC version: 12.2.0\n"
    )
    expect(found(compute.gpu), "warn", "driver 570.86.15", "built without CUDA", "CUDA build")
    monkeypatch.setattr(
        choice, "look", lambda: CARD._replace(unusable="Card 9000 has compute capability 7.5")
    )
    expect(found(compute.gpu), "warn", "7.5", "--device cpu")
    monkeypatch.setattr(choice, "look", lambda: CARD)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("CC", "cc")
    finding = found(compute.gpu)
    assert finding.status == "ok"
    for part in (
        "Card 9000, 81920 MiB, compute capability 9.0, 71680 MiB free",
        "driver 570.86.15",
        "CUDA 13.0",
        "Triton ",
        "attention triton, torch",
    ):
        assert part in finding.found
    monkeypatch.delenv("CC")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    expect(found(compute.gpu), "warn", "no C compiler", "install gcc")


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "look", lambda: CARD)


def test_device(monkeypatch: pytest.MonkeyPatch, card: None) -> None:
    told = found(model.device, configured()).found
    assert (
        told.startswith("cuda, bfloat16, attention triton, up to 256 sequences")
        and "torch sees Card 9000" in told
    )
    expect(
        found(model.device, configured(attention="flash_attn")),
        "fail",
        "numerics is strict",
        "attention triton",
    )
    assert (
        found(model.device, configured(device="cpu")).found
        == "cpu, float32, attention cpu, up to 64 sequences"
    )
    expect(
        found(model.device, configured(attention="tirton")),
        "fail",
        "attention is 'tirton', which no device has",
        "use auto, triton",
    )
    on_cpu = configured(device="cpu", attention="flash_attn")
    expect(
        found(model.device, on_cpu), "fail", "needs a GPU (device cuda)", "use auto, cpu or torch"
    )
    monkeypatch.setattr(model, "look", lambda: CARD._replace(unusable="torch finds no GPU"))
    assert "device cpu: torch finds no GPU" in found(model.device, configured()).found
    expect(
        found(model.device, configured(device="cuda")), "fail", "torch finds no GPU", "--device cpu"
    )
    assert found(model.target, configured(device="cuda")).status == "ok", (
        "a checkpoint is read all the same"
    )
    for check in (model.memory, model.numerics):
        for wrong in ({"device": "cuda"}, {"attention": "foo"}):
            expect(
                found(check, configured(**wrong)),
                "fail",
                "not checked, as nothing is chosen that would compute",
                "the check device",
            )


def test_what_a_gpu_holds(card: None, tmp_path: Path) -> None:
    finding = found(model.memory, configured(max_model_len=4096))
    assert (
        finding.status == "ok"
        and "of weights" in finding.found
        and int(CLEAR.search(finding.found)[1]) == 256 * 256
    )  # type: ignore[index]
    less = found(model.memory, configured(max_model_len=4096, memory_fraction=0.16))
    assert less.status == "ok" and int(CLEAR.search(less.found)[1]) < 256 * 256  # type: ignore[index]
    assert "for pushed weights" in found(model.memory, configured(weight_root=tmp_path)).found
    expect(
        found(model.memory, configured(memory_fraction=0.13)),
        "fail",
        "for one sequence of max_model_len",
        "raise memory_fraction to 0.",
    )
    assert "not here" in found(model.numerics, configured()).found


def test_models_that_a_gpu_refuses(pair: Path, card: None) -> None:
    assert (
        found(model.target, broken(pair)).status
        == found(model.drafter, broken(pair)).status
        == "ok"
    )
    target, head = pair / "target" / "config.json", pair / "drafter" / "config.json"
    rewrite(head, mlp_bias=True)
    expect(found(model.drafter, broken(pair)), "fail", "'mlp_bias' true", "--device cpu")
    rewrite(target, head_dim=48)
    expect(found(model.target, broken(pair)), "fail", "'head_dim' 48", "--device cpu")
    expect(found(model.target, broken(pair, device="cpu")), "fail", "has shape")
    rewrite(target, architectures=["LlamaForCausalLM"], attention_bias=True)
    expect(found(model.target, broken(pair)), "fail", "'attention_bias' true", "--device cpu")


def test_torch_without_vector_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    expect(found(compute.torch_import), "warn", "DEFAULT", "AVX2")
