"""Each check of `tlt doctor` finds the fault that is planted for it, with a remedy."""

from __future__ import annotations

import os
import resource
import shutil
import socket
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

from tlt_server.__main__ import _parse
from tlt_server.config import Config
from tlt_server.demo.workload import DRAFTER, TARGET
from tlt_server.doctor import compute, host, places
from tlt_server.doctor.checks import Finding, examine, ok
from tlt_server.doctor.cluster import examine_cluster
from tlt_server.doctor.settings import read, usable_settings, written
from tlt_server.engine.devices import choice
from tlt_server.engine.devices.choice import Gpu

ROOT = Path(__file__).parents[2]
GIB, MIB = 2**30, 2**20
CARD = Gpu("Card 9000", (9, 0), 70 * GIB, 80 * GIB)


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
    assert finding.remedy
    assert not finding.remedy.startswith("see"), "a finding that is not ok has a remedy"
    for word in words:
        assert word in finding.found + finding.remedy, f"{word!r} is not in {finding}"


def fails(check: Callable[..., Finding], config: Config, *words: str) -> None:
    expect(found(check, config), "fail", *words)


def warns(check: Callable[..., Finding], config: Config, *words: str) -> None:
    expect(found(check, config), "warn", *words)


def expect_ok(finding: Finding, text: str) -> None:
    assert (finding.status, finding.found) == ("ok", text)


def test_crashing_check_is_reported_as_a_finding() -> None:
    def breaks() -> Finding:
        raise ZeroDivisionError("of no use")

    expect(found(breaks), "fail", "ZeroDivisionError", "of no use")


def test_doctor_checks_the_python_version(monkeypatch: pytest.MonkeyPatch) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (low, high) = host.SUPPORTED
    assert SpecifierSet(project["requires-python"]) == SpecifierSet(
        f">={low[0]}.{low[1]},<{high[0]}.{high[1]}"
    )
    monkeypatch.setattr(sys, "version_info", (3, 10, 0))
    expect(found(host.python), "fail", "Python 3.11 or 3.12")


def test_doctor_checks_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_doctor_checks_the_locale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("locale.getpreferredencoding", lambda set: "ANSI_X3.4-1968")
    expect(found(host.locale_encoding), "warn", "ANSI", "LANG=C.UTF-8")


def test_doctor_checks_the_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: "/" + "t" * 90)
    expect(found(host.sockets), "fail", "107", "TMPDIR")


def test_doctor_checks_the_open_file_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 2000))
    fails(
        host.open_files,
        configured(max_connections=1024),
        "may open 2000 files",
        "may need 2880",
        "ulimit -Hn 2880",
    )
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 4096))
    assert found(host.open_files, configured(max_connections=1024)).status == "ok"
    monkeypatch.setattr(
        resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    )
    assert found(host.open_files, configured()).status == "ok"


def test_doctor_checks_the_processors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(host, "CPU_QUOTA", tmp_path / "cpu.max")
    assert found(host.processors, configured(threads=8)).status == "ok"
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert found(host.processors, configured(threads=8)).status == "ok"
    (tmp_path / "cpu.max").write_text("350000 100000\n")
    warns(host.processors, configured(threads=8), "8 compute threads", "3.5", "--threads 3")


def test_doctor_checks_the_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    warns(host.libraries, configured(), "unset OMP_WAIT_POLICY")
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    assert found(host.libraries, configured()).status == "ok"


def test_doctor_checks_the_api_keys(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("\n")
    fails(places.api_keys, configured(api_key_file=keys), "holds no key", "one per line")
    keys.write_text("secret")
    keys.chmod(0o644)
    warns(places.api_keys, configured(api_key_file=keys), f"chmod 600 {keys}")
    keys.chmod(0o600)
    warns(places.api_keys, configured(api_key_file=keys), "all scopes", "scopes=data")
    keys.write_text("secret scopes=data name=trainer")
    expect_ok(found(places.api_keys, configured(api_key_file=keys)), "trainer")


def test_doctor_checks_the_ports() -> None:
    free = {"port": 0, "grpc_port": 0, "link_port": 0, "probe_port": 0}
    said = found(places.port, configured(**free))
    assert said.status == "ok"
    assert said.found.endswith(
        "is free, and another for gRPC, and another for a gateway, and another for probes"
    )
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        free["link_port"] = taken.getsockname()[1]
        fails(places.port, configured(**free), "cannot bind", "--link-port")


def test_doctor_checks_the_tracing_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    expect_ok(found(places.traces, configured()), "none")
    settings = configured(otlp_endpoint="http://127.0.0.1:4318")
    expect_ok(found(places.traces, settings), "the OpenTelemetry SDK is installed")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    fails(places.traces, settings, "not installed", "tlt-server[otlp]")


def test_doctor_checks_the_certificates(tmp_path: Path) -> None:
    issued = trustme.CA().issue_cert("127.0.0.1")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    issued.cert_chain_pems[0].write_to_path(cert)
    settings = configured(tls_cert=cert, tls_key=key)
    fails(places.certificates, settings, "cannot read tls_key", "PEM file")
    issued.private_key_pem.write_to_path(key)
    key.chmod(0o644)
    warns(places.certificates, settings, f"chmod 600 {key}")
    key.chmod(0o600)
    expect_ok(found(places.certificates, settings), str(cert))
    expect_ok(found(places.certificates, configured()), "none: plain HTTP")


def test_doctor_checks_the_weight_root(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    warns(places.weight_root, configured(weight_root=tmp_path), f"chmod o-w {tmp_path}")


def test_doctor_checks_the_state_directory(tmp_path: Path) -> None:
    warns(places.state_directory, configured(weight_root=tmp_path), "--state-dir")
    (tmp_path / "file").write_text("")
    fails(
        places.state_directory,
        configured(state_dir=tmp_path / "file" / "state"),
        "another --state-dir",
    )
    assert (
        "will be made"
        in found(places.state_directory, configured(state_dir=tmp_path / "a" / "b")).found
    )
    tmp_path.chmod(0o770)
    warns(places.state_directory, configured(state_dir=tmp_path), f"chmod 700 {tmp_path}")
    assert list(tmp_path.iterdir()) == [tmp_path / "file"], "a check changes nothing"


def test_doctor_checks_the_step_times(tmp_path: Path) -> None:
    finding = found(places.step_times, configured(state_dir=tmp_path))
    expect_ok(finding, f"none yet in {tmp_path}: measured at the next start")


@pytest.mark.parametrize(("free", "status"), [(10, "fail"), (90, "warn"), (4000, "ok")])
def test_doctor_checks_the_disk(
    free: int, status: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(GIB, GIB, free * 2**20)
    )
    finding = found(places.disk_space, configured(state_dir=tmp_path))
    assert finding.status == status
    assert "GiB free" in finding.found
    assert bool(finding.remedy) == (status != "ok")


def test_doctor_checks_the_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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
    twice = Gpu(unusable="CUDA_VISIBLE_DEVICES names GPU 0 twice", twice="0")
    monkeypatch.setattr(choice, "look", lambda: twice)
    expect(found(compute.gpu), "warn", "GPU 0 twice: only --device cpu starts", "each GPU once")
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


def test_doctor_reports_torch_without_vector_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    expect(found(compute.torch_import), "warn", "DEFAULT", "AVX2")


@pytest.mark.parametrize(
    ("flags", "at_fault", "still_read"),
    [
        ({"port": "eighty"}, ["port"], "max_queue"),
        ({"port": "eighty", "max_queue": "0"}, ["max_queue", "port"], "max_rows"),
        ({"model": "/none", "max_rows": "9"}, ["max_model_len", "model"], "max_rows"),
        ({"modle": "/none"}, [], "model"),
        ({"max_bodies_mb": "1"}, ["max_bodies_mb", "max_body_mb"], "port"),
        ({"host": "0.0.0.0", "port": "x"}, ["host", "port"], "api_key_file"),
    ],
    ids=str,
)
def test_sound_settings_are_checked_next_to_bad_ones(
    flags: dict[str, Any], at_fault: list[str], still_read: str
) -> None:
    """The process of the checks that need torch gets the same."""
    given = {"model": str(TARGET), "drafter": str(DRAFTER), **flags}
    config, faults = usable_settings(given, None)
    assert config is not None and faults
    for sound in (config, read(written(config))):
        getattr(sound, still_read)
        for name in at_fault:
            finding = found(lambda: ok(str(getattr(sound, name))))  # noqa: B023
            expect(finding, "fail", f"not checked, as {name} is at fault", f"correct {name} first")


def test_sound_settings_have_no_fault(tmp_path: Path) -> None:
    config, faults = usable_settings({"model": str(TARGET), "max_rows": "9"}, None)
    assert config is not None and (config.max_rows, faults) == (9, [])
    (tmp_path / "settings.yaml").write_text("port: [")
    config, faults = usable_settings({"model": str(TARGET)}, tmp_path / "settings.yaml")
    assert config is None and "cannot read the configuration file" in faults[0].message


def test_unreadable_model_does_not_stop_other_checks(tmp_path: Path) -> None:
    config, faults = usable_settings({"model": str(tmp_path), "port": "0"}, None)
    assert config is not None and "config.json" in faults[0].message
    assert found(places.port, config).status == "ok"
    expect(found(lambda: ok(str(config.model))), "fail", "as model is at fault")


class FakeRay:
    """Two nodes of a cluster."""

    @staticmethod
    def nodes() -> list[dict[str, Any]]:
        node = {"Alive": True, "NodeManagerAddress": "127.0.0.1", "Labels": {"kind": "h200"}}
        return [{**node, "Resources": {"CPU": 16.0, "GPU": gpus}} for gpus in (2.0, 5.0)]


@pytest.mark.parametrize(
    ("line", "status", "words"),
    [
        ("--replicas 6 --replica-cpus 4", "ok", ["6 replicas of 4 CPU and 1 GPU fit"]),
        ("--tensor-parallel 2 --replicas 4", "fail", ["3 replicas of 5 CPU and 2 GPU fit, 4 are"]),
        ("--tensor-parallel 8", "fail", ["8 GPU of one node", "add nodes"]),
        ("--ray-labels kind=b200", "fail", ["no node", "correct --ray-labels"]),
    ],
)
def test_doctor_checks_what_fits_on_a_ray_cluster(
    line: str, status: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tlt_server.fleet.launchers.ray.connected", FakeRay)
    given = _parse(["doctor", "--launcher", "ray", *line.split()])
    config = configured(device="cuda", tensor_parallel=int(getattr(given, "tensor_parallel", 1)))
    nodes, fit, health = examine_cluster(config, given)
    assert nodes == Finding("ok", "2 nodes with 32 CPUs, 7 GPUs", check="ray cluster")
    assert (fit.status, fit.check) == (status, "ray replicas")
    assert all(word in fit.found + fit.remedy for word in words), fit
    assert health.check == "ray health check" and health.status in ("ok", "warn")


def test_doctor_reports_a_cluster_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    (finding,) = examine_cluster(configured(), _parse(["doctor", "--launcher", "ray"]))
    expect(finding, "fail", "not installed", "tlt-server[fleet]")
