"""Kernels compiled ahead by another process: what it reports, and what becomes of a start when it
fails.
"""

from __future__ import annotations

import json
import os
import pkgutil
import select
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import msgspec
import pytest
from triton.runtime.jit import KernelInterface

import tlt_kernels.gpu
from tests.processes import command
from tests.waiting import until
from tlt_kernels.gpu.variants import Variant
from tlt_server.engine.gpu.start.compiling import Compiled, ParallelCompiler
from tlt_server.engine.gpu.start.kernel_records import record_name, toolchain

TARGET = ("cuda", 90, 32)
VARIANTS = [Variant("tlt_kernels.gpu.growth", "_grow", f'{{"depth": {i}}}') for i in range(3)]
READ = "import json, sys, time\nlines = sys.stdin.read().splitlines()\n"
DONE = "for i in range(len(lines) - 1): print(json.dumps([i, '', True]), flush=True)\n"


def started(tmp_path: Path, script: str, variants: list[Variant] | None = None) -> ParallelCompiler:
    (tmp_path / "compiler.py").write_text(READ + script)
    command = (sys.executable, str(tmp_path / "compiler.py"))
    return ParallelCompiler(TARGET, variants, workers=3, niceness=10, command=command)


@pytest.mark.parametrize("known", [True, False])
def test_compiler_receives_kernel_variants_when_they_are_known(
    known: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    told = "'\\n'.join([sys.argv[1], sys.argv[3], *lines])"
    script = f"open({str(tmp_path / 'told')!r}, 'w').write({told})\n"
    compiler = started(tmp_path, script + DONE, VARIANTS if known else None)
    if not known:
        compiler.compile(VARIANTS)
    progress: list[tuple[int, int]] = []
    assert compiler.wait(lambda done, of: progress.append((done, of))) == 3
    assert progress == [(1, 3), (2, 3), (3, 3)]
    workers, niceness, target, *lines = (tmp_path / "told").read_text().splitlines()
    assert (workers, niceness) == ("3", "10") and target == '["cuda", 90, 32]'
    assert lines[0] == '["tlt_kernels.gpu.growth", "_grow", "{\\"depth\\": 0}"]'
    assert len(lines) == 3 and capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("script", "compiled", "says"),
    [
        (
            "print(json.dumps([0, '', True]))\nprint(json.dumps([1, 'no memory', False]))",
            1,
            "no memory",
        ),
        ("print(json.dumps([0, '', True]))\nsys.exit(7)", 1, "status 7"),
        ("print(json.dumps([0, '', True]), flush=True)\ntime.sleep(600)", 1, "status -9"),
        ("sys.exit(1)", 0, "status 1"),
    ],
)
def test_start_without_a_compiler_goes_on_with_one_line(
    script: str, compiled: int, says: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    compiler = started(tmp_path, script, VARIANTS)
    select.select([compiler._process.stdout], [], [])  # it has said something, or has ended
    silent_s = 0.2 if "sleep" in script else 600
    assert compiler.wait(lambda done, of: None, silent_s=silent_s) == compiled
    [line] = capfd.readouterr().err.splitlines()
    assert f"{3 - compiled} of 3 kernels were not compiled ahead ({says})" in line


def test_kernels_found_in_the_cache_are_not_counted_as_compiled(tmp_path: Path) -> None:
    script = "for i in range(3): print(json.dumps([i, '', i == 1]), flush=True)\n"
    compiler = started(tmp_path, script, VARIANTS)
    assert compiler.end(lambda done, of: None) == Compiled(3, "", 1)


def test_end_of_the_compiler_before_its_first_request_is_found(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "compiler.py").write_text("import sys\nsys.exit(3)")
    compiler = ParallelCompiler(
        TARGET, None, workers=1, command=(sys.executable, str(tmp_path / "compiler.py"))
    )
    compiler._process.wait()
    compiler.compile(VARIANTS)
    assert compiler.wait(lambda done, of: None) == 0
    assert "3 of 3 kernels were not compiled ahead (status 3)" in capfd.readouterr().err


@pytest.mark.slow
def test_compiler_and_its_workers_end_after_the_engine_is_killed(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    compiler = (sys.executable, "-m", "tests.unit.hung_compiler", str(pids))
    engine = (
        "import time; from tlt_server.engine.gpu.start.compiling import ParallelCompiler\n"
        f"kept = ParallelCompiler({TARGET}, [('m', 'k', 's')] * 2, workers=2, command={compiler})\n"
        "time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", engine]) as process:
        try:
            until(lambda: pids.exists() and len(pids.read_text().split()) == 4)
        finally:
            process.kill()
    until(lambda: not any(map(command, pids.read_text().split())))


def test_niceness_is_raised_and_never_lowered() -> None:
    said = (
        "import os; from tlt_kernels.gpu.compiler import be_nice\n"
        "be_nice(10); print(os.nice(0)); os.nice(12); print(os.nice(0))\n"
        "be_nice(10); print(os.nice(0))"
    )
    ran = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, check=True)
    first, before, after = map(int, ran.stdout.split())
    assert first == max(10, os.nice(0)) and before == after == min(19, first + 12)


def test_a_kernel_is_found_by_its_name() -> None:
    for module in pkgutil.iter_modules(tlt_kernels.gpu.__path__):
        for name, value in vars(import_module(f"tlt_kernels.gpu.{module.name}")).items():
            if isinstance(value, KernelInterface):
                assert value.__name__ == name, f"another process finds {module.name} by its name"


def test_kernel_dependencies_can_be_serialised() -> None:
    found = toolchain()
    assert msgspec.json.decode(msgspec.json.encode(found)) == found
    assert record_name(found, "a") != record_name(found, "b")


HASHES = """
import json, pkgutil
from importlib import import_module
from triton.runtime.jit import JITCallable
import tlt_kernels.gpu as kernels

found = {}
for module in pkgutil.iter_modules(kernels.__path__, f"{kernels.__name__}."):
    for value in vars(import_module(module.name)).values():
        if isinstance(value, JITCallable):
            found[f"{value.__module__}.{value.__name__}"] = value

def keys(order):
    for each in found.values():
        each.hash, each.used_global_vals = None, {}
    return {name: found[name].cache_key for name in order}

forwards, backwards = keys([*found]), keys([*found][::-1])
print(json.dumps([len(found), [name for name in found if forwards[name] != backwards[name]]]))
"""


def test_kernel_keys_do_not_depend_on_earlier_hashes() -> None:
    """Triton's cache then has a kernel that another process compiled."""
    compiling = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, "-c", HASHES], env=compiling, capture_output=True, text=True, check=True
    )
    count, differing = json.loads(ran.stdout)
    assert count > 100 and differing == []
