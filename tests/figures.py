"""Figures of the code's size and shape: `python -m tests.figures`, from the root of a checkout.

Lines and statements count Python files that git tracks, without what `protoc` makes. Rooms of a
package are the files and folders in it, arrows the imports between them, floors the longest chain
of arrows; `up` counts the arrows that close a circle.
"""

from __future__ import annotations

import ast
import json
import re
import statistics
import subprocess
from collections.abc import Iterable
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

SOURCE = ("tlt_server", "kernels", "clients", "benchmarks", "examples")
STATEMENTS = SOURCE[:3]
PARTS = {
    "frontend": ("tlt_server/frontend",),
    "engine": ("tlt_server/engine",),
    "bench + benchmarks": ("tlt_server/bench", "benchmarks"),
    "trainer": ("tlt_server/trainer",),
    "kernels": ("kernels",),
    "clients": ("clients",),
}
MADE = re.compile(r"_pb2(_grpc)?\.pyi?$")
GENERATED_PAGE = "docs/performance.md"


def tracked(*folders: str, suffix: str = ".py") -> list[Path]:
    """Return the files under these folders, without those that a tool made."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", *folders], capture_output=True, text=True, check=True
    )
    paths = [Path(name) for name in listed.stdout.split("\0") if name.endswith(suffix)]
    return [path for path in paths if not MADE.search(path.name)]


def lines(paths: Iterable[Path]) -> list[int]:
    return [path.read_text().count("\n") for path in paths]


def statements(paths: Iterable[Path]) -> int:
    return sum(
        isinstance(node, ast.stmt)
        for path in paths
        for node in ast.walk(ast.parse(path.read_text()))
    )


def long_functions(paths: Iterable[Path], limit: int = 60) -> list[str]:
    """Return the functions with more lines than the limit."""
    return [
        f"{path}:{node.name}"
        for path in paths
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno + 1 > limit
    ]


def graph(package: str) -> dict[str, set[str]]:
    """Return what each module of a package imports of its other modules, also in functions."""
    modules = {
        path.with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__"): path
        for path in tracked(package)
    }
    found: dict[str, set[str]] = {name: set() for name in modules}
    for name, path in modules.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                named = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                named = [f"{node.module}.{alias.name}" for alias in node.names] + [node.module]
            else:
                continue
            found[name] |= {each for each in named if each in modules and each != name}
    return found


def rooms(package: str) -> dict[str, set[str]]:
    """Return what each file and folder in a package imports of the others in it."""
    depth = package.count("/") + 1
    found: dict[str, set[str]] = {}
    for name, others in graph(package).items():
        room, *_ = name.split(".")[depth:] or ["__init__"]
        found.setdefault(room, set()).update(
            (other.split(".")[depth:] or ["__init__"])[0] for other in others
        )
    return {room: others - {room} for room, others in found.items()}


def floors(arrows: dict[str, set[str]]) -> tuple[int, list[str]]:
    """Return the longest chain of imports, without the arrows that close a circle; and these."""
    left, up = {name: set(others) for name, others in arrows.items()}, []
    while True:
        try:
            order = [*TopologicalSorter(left).static_order()]
            break
        except CycleError as error:
            imported, importing, *_ = error.args[1]
            up.append(f"{importing} -> {imported}")
            left[importing].discard(imported)
    height: dict[str, int] = {}
    for name in order:
        height[name] = 1 + max((height[other] for other in left[name]), default=0)
    return max(height.values()), up


def words(paths: Iterable[Path]) -> int:
    return sum(len(path.read_text().split()) for path in paths)


def figures() -> dict[str, object]:
    source, tests = tracked(*SOURCE), tracked("tests")
    counts = lines(source)
    docs = [path for path in tracked("docs", suffix=".md") if path.as_posix() != GENERATED_PAGE]
    engine = rooms("tlt_server/engine")
    height, up = floors(engine)
    outside = [path for path in source if "kernels" not in path.parts]
    judged = re.compile(r"isinstance\([^()]*Eagle")
    return {
        "source lines": sum(counts),
        "statements of server, kernels and clients": statements(tracked(*STATEMENTS)),
        "source files": len(counts),
        "median lines of a file": statistics.median(counts),
        "files above 400 lines": sum(count > 400 for count in counts),
        "lines of parts": {name: sum(lines(tracked(*part))) for name, part in PARTS.items()},
        "test lines": sum(lines(tests)),
        "words of docs without the generated page": words(docs),
        "functions above 60 lines outside kernels": len(long_functions(outside)),
        "isinstance(..., Eagle*)": sum(len(judged.findall(path.read_text())) for path in source),
        "engine": {
            "rooms": len(engine),
            "arrows": sum(map(len, engine.values())),
            "floors": height,
            "up": up,
        },
        "circles of files": floors(graph("tlt_server"))[1],
    }


if __name__ == "__main__":
    print(json.dumps(figures(), indent=2))
