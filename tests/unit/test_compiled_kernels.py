"""Kernels of the host: Python calls none but with declared types, which a start makes ready."""

from __future__ import annotations

import ast
import pkgutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from threading import Barrier
from types import FunctionType, ModuleType

import numpy as np
import pytest
from numba.core.dispatcher import Dispatcher

import tlt_kernels.cpu
import tlt_server
from tlt_kernels.cpu import tree
from tlt_kernels.cpu.compiled import MODULES, Kernel, cache_directory, compile_all, kernels

PACKAGE = "tlt_kernels.cpu"
COLD = """
from tlt_kernels.cpu.compiled import compile_all, kernels
steps = []
new = compile_all(("counts", "catch_up"), lambda *step: steps.append(step))
print(new, steps, all(each.ready and each.cached for each in kernels(("counts", "catch_up"))))
"""


def modules() -> list[ModuleType]:
    names = [name for _, name, _ in pkgutil.iter_modules(tlt_kernels.cpu.__path__)]
    return [import_module(f"{PACKAGE}.{name}") for name in names]


def undeclared() -> dict[str, set[str]]:
    """Return the compiled functions without declared types, by module: parts of kernels."""
    declared = {id(each.dispatcher) for each in kernels()}
    return {
        module.__name__: {
            name
            for name, value in vars(module).items()
            if isinstance(value, Dispatcher) and id(value) not in declared
        }
        for module in modules()
    }


def test_all_modules_with_kernels_are_compiled_at_start() -> None:
    declared = {each.dispatcher.__module__.rpartition(".")[2] for each in kernels()}
    own = {
        module.__name__.rpartition(".")[2]
        for module in modules()
        if "@kernel(" in Path(str(module.__file__)).read_text()
    }
    assert set(MODULES) == declared == own


def test_server_calls_no_kernel_without_declared_types() -> None:
    parts, found = undeclared(), []
    for path in Path(tlt_server.__file__).parent.rglob("*.py"):
        source = path.read_text()
        if PACKAGE not in source:
            continue
        tree_of = ast.parse(source)
        aliases = {}
        for node in ast.walk(tree_of):
            if isinstance(node, ast.ImportFrom) and node.module == PACKAGE:
                aliases |= {a.asname or a.name: f"{PACKAGE}.{a.name}" for a in node.names}
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE):
                names = parts.get(str(node.module), set())
                found += [f"{path.name}: {a.name}" for a in node.names if a.name in names]
        found += [
            f"{path.name}: {node.attr}"
            for node in ast.walk(tree_of)
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.attr in parts.get(aliases.get(node.value.id, ""), ())
        ]
    assert not found


def test_wrappers_call_no_kernel_without_declared_types() -> None:
    parts = undeclared()
    found = [
        f"{module.__name__}.{name}: {called}"
        for module in modules()
        for name, value in vars(module).items()
        if isinstance(value, FunctionType) and value.__module__ == module.__name__
        for called in value.__code__.co_names
        if called in parts[module.__name__]
    ]
    assert not found


def test_kernel_takes_no_types_but_those_declared() -> None:
    one, token = np.zeros(1, np.int32), np.zeros(1, np.int64)
    assert tree.walk(one, one, one, token, one)[2].tolist() == [0]
    before = list(tree.walk.overloads)
    with pytest.raises(TypeError, match="No matching definition"):
        tree.walk(one, one, one, token.astype(np.float32), one)
    assert list(tree.walk.overloads) == before


def test_concurrent_first_calls_of_a_kernel_all_succeed() -> None:
    (declared,) = (each for each in kernels(["tree"]) if each.dispatcher is tree.walk)
    one, token = np.zeros(1, np.int32), np.zeros(1, np.int64)
    for _ in range(20):
        again, together = Kernel(tree.walk.py_func, declared._types, {}), Barrier(8)

        def call(kernel: Kernel = again, together: Barrier = together) -> list[int]:
            together.wait()
            return list(kernel.dispatcher(one, one, one, token, one)[2].tolist())

        with ThreadPoolExecutor(8) as threads:
            calls = [threads.submit(call) for _ in range(8)]
        assert [each.result() for each in calls] == [[0]] * 8


def test_kernels_in_the_cache_are_loaded_without_progress() -> None:
    compile_all(("counts",), lambda done, of: None)
    steps: list[tuple[int, int]] = []
    assert compile_all(("counts",), lambda *step: steps.append(step)) == 0 and not steps
    assert Path(cache_directory()).is_dir()


def test_empty_cache_is_filled_once_with_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))

    def start() -> str:
        return subprocess.check_output([sys.executable, "-c", COLD], text=True).strip()

    assert start() == "3 [(0, 3), (1, 3), (2, 3)] True"
    assert start() == "0 [] True"
    asked = "from tlt_server.doctor.compute import kernels; print(kernels().found)"
    found = subprocess.check_output([sys.executable, "-c", asked], text=True)
    rest = len(kernels()) - 3
    assert f"{rest} of {rest + 3} kernels are not in its cache {tmp_path}" in found
    assert "the first start on a CPU compiles them, once per machine" in found
