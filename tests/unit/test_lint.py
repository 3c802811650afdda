"""Rules over all code: no pickle in any form, nothing else that runs code while it reads data, and
no class name that stands twice in one process.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from tests.unit import english

ROOT = Path(__file__).parents[2]
FOLDERS = ("tlt_server", "kernels", "clients", "examples", "benchmarks", "tests")
BANNED_MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve"}
BANNED_METHODS = {"recv_pyobj", "send_pyobj", "send_serialized", "recv_serialized"}


# Without one of these words no rule of `banned_in` applies.
WORDS = {*BANNED_MODULES, *BANNED_METHODS, "allow_pickle", "__import__", "reduction", "load"}
SUSPICIOUS = re.compile(rf"\b({'|'.join(sorted(WORDS))})\b")


def banned_in(source: str) -> Iterator[str]:
    if not SUSPICIOUS.search(source):
        return
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from (
                    f"{node.lineno}: import {a.name}"
                    for a in names
                    if a.name.split(".")[0] in BANNED_MODULES
                )
            case ast.ImportFrom(module=str(module), names=names):
                if module.split(".")[0] in BANNED_MODULES or (
                    module.startswith("torch") and any(a.name == "load" for a in names)
                ):
                    yield f"{node.lineno}: from {module} import"
                if module == "multiprocessing" and any(a.name == "reduction" for a in names):
                    yield f"{node.lineno}: multiprocessing.reduction pickles"
            case ast.Attribute(value=ast.Name(id="torch"), attr="load"):
                yield f"{node.lineno}: torch.load"
            case ast.Attribute(attr=attribute) if attribute in BANNED_METHODS:
                yield f"{node.lineno}: {attribute}"
            case ast.Call():
                yield from banned_call(node)


def banned_call(node: ast.Call) -> Iterator[str]:
    for keyword in node.keywords:
        if keyword.arg == "allow_pickle" and not (
            isinstance(keyword.value, ast.Constant) and keyword.value.value is False
        ):
            yield f"{node.lineno}: allow_pickle"
    if isinstance(node.func, ast.Name) and node.func.id == "__import__":
        yield f"{node.lineno}: __import__ hides what it imports"
    named = [a.value for a in node.args[:1] if isinstance(a, ast.Constant)]
    if any(value in BANNED_MODULES for value in named) and "import" in ast.unparse(node.func):
        yield f"{node.lineno}: {ast.unparse(node)}"


FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
OURS = [path for path in FILES if not path.name.startswith("rollout_pb2")]  # the rest is generated


def listed(offences: Callable[[Path], Iterable[str]], files: list[Path]) -> list[str]:
    """Return `file:line: reason` for every offence, for one test to show all of them."""
    return [f"{path.relative_to(ROOT)}:{said}" for path in files for said in offences(path)]


def sources(*folders: str) -> list[Path]:
    return [path for path in OURS if str(path.relative_to(ROOT)).startswith(folders)]


def test_no_file_can_pickle() -> None:
    assert len(FILES) > 300
    assert listed(lambda path: banned_in(path.read_text()), FILES) == []


def test_sentences_of_the_code_are_in_plain_english() -> None:
    spoken = [path for path in OURS if path.name not in ("english.py", "test_lint.py")]
    assert listed(english.offenders, spoken) == []


def functions_above_60_lines(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or 0) - node.lineno + 1
            if lines > 60:
                yield f"{node.lineno}: {node.name} has {lines} lines"


def test_no_function_of_the_frontend_is_above_60_lines() -> None:
    assert listed(functions_above_60_lines, sources("tlt_server/frontend")) == []


def file_above_400_lines(path: Path) -> Iterator[str]:
    lines = path.read_text().count("\n")
    if lines > 400:
        yield f"{lines} lines"


def test_no_source_file_is_above_400_lines() -> None:
    assert listed(file_above_400_lines, sources("tlt_server", "kernels", "clients")) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import dill as d",
        "from cloudpickle import dumps",
        "import marshal",
        "import shelve",
        "torch.load('x')",
        "from torch import load",
        "from torch.serialization import load",
        "socket.recv_pyobj()",
        "socket.send_pyobj(1)",
        "numpy.load('x', allow_pickle=True)",
        "np.load('x', allow_pickle=flag)",
        "importlib.import_module('pickle')",
        "__import__('os')",
    ],
)
def test_lint_reports_each_offence(source: str) -> None:
    assert list(banned_in(source))


@pytest.mark.parametrize(
    "source",
    ["torch.save", "np.load('x', allow_pickle=False)", "json.load(f)", "from torch import Tensor"],
)
def test_lint_accepts_sound_code(source: str) -> None:
    assert not list(banned_in(source))


@pytest.mark.parametrize("folder", ["kernels", "clients", "tests", "docker"])
def test_plain_folders_have_no_init_file(folder: str) -> None:
    assert not (ROOT / folder / "__init__.py").exists()


OTHER_END = {f"clients/tlt_client/{name}.py" for name in ("errors", "fields", "wire")}


def places_of_classes(files: Iterable[Path]) -> dict[str, list[str]]:
    """Return every public class name and the files that define it. The client's errors and messages
    do not count against the frontend's, since both ends of a wire name the same thing alike.
    """
    found: defaultdict[str, list[str]] = defaultdict(list)
    for path in files:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(str(path.relative_to(ROOT)))
    for places in found.values():
        if all(
            place in OTHER_END or place.startswith(("tlt_server/frontend/", "tlt_server/errors.py"))
            for place in places
        ):
            places[:] = [place for place in places if place not in OTHER_END] or places[:1]
    return dict(found)


def test_class_names_are_unique_in_a_process() -> None:
    classes = places_of_classes(
        path
        for path in OURS
        if path.relative_to(ROOT).parts[0] in ("tlt_server", "kernels", "clients")
    )
    assert len(classes) > 300
    assert {name: places for name, places in classes.items() if len(places) > 1} == {}
