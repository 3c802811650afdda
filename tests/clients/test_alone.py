"""The client's distribution by itself, built and installed: it and what its dependencies name,
nothing else; so no torch, and none of the server.

pip builds it with the setuptools that is here, and its dependencies are the files that are
installed here, so no network is needed: a directory with these distributions' packages, and an
interpreter that sees that directory and its own standard library.
"""

import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.frontend.live_server import LiveServer, live_server
from tests.frontend.tiny_model import write_model
from tests.processes import completed

CLIENTS = Path(__file__).parents[2] / "clients"
HEAVY = ("torch", "transformers", "tlt_server", "pydantic", "starlette", "zmq")
ASKS = """
import asyncio, sys
import tlt_client
from tlt_client import AsyncClient, Client, Done, Retries, ServerError

url, items, short = sys.argv[1], [{"id": "a", "prompt": "abc"}], {"max_tokens": 3}

async def asked():
    async with AsyncClient(url, api_key="key", timeout_s=20, retries=Retries(times=1)) as client:
        return (await client.generate(items, sampling=short)).results[0].choices[0].text

with Client(url, api_key="key", timeout_s=20) as client:
    text = client.generate(items, sampling=short).results[0].choices[0].text
    assert text == asyncio.run(asked()) == "abc"
    assert isinstance(list(client.stream(items, sampling=short))[-1], Done)
    rollout = client.generate(items, sampling=short, detach=True)
    assert rollout.result(60).results[0].choices[0].text == "abc"
    rollout.delete()
    assert client.update_weights("p", "v1")["state"] == "committed"
    assert client.weights()["target"] == "v1"
    try:
        client.set_strategy("beg")
    except ServerError as error:
        assert error.code == "invalid_request"
print(*sorted({name.partition(".")[0] for name in sys.modules}))
"""


def closure(names: list[str]) -> Iterator[metadata.Distribution]:
    """Return these distributions and what they need here, without extras."""
    seen, left = set[str](), list(names)
    while left:
        requirement = Requirement(left.pop())
        name = requirement.name.lower().replace("_", "-")
        if name in seen or (
            requirement.marker is not None and not requirement.marker.evaluate({"extra": ""})
        ):
            continue
        seen.add(name)
        found = metadata.distribution(name)
        left += found.requires or []
        yield found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a directory that replaces an interpreter's installed packages."""
    place, source = tmp_path_factory.mktemp("alone"), tmp_path_factory.mktemp("source") / "clients"
    traces = shutil.ignore_patterns(
        "__pycache__", "*.egg-info", "build"
    )  # left by an earlier build
    shutil.copytree(CLIENTS, source, ignore=traces)
    quiet = ("--quiet", "--disable-pip-version-check", "--no-index", "--no-deps")
    where = ("--no-build-isolation", "--target", str(place), str(source))
    install = [sys.executable, "-m", "pip", "install", *quiet, *where]
    done = completed(install)
    assert done.returncode == 0, done.stdout + done.stderr
    needs = tomllib.loads((CLIENTS / "pyproject.toml").read_text())["project"]["dependencies"]
    for distribution in closure(needs):
        for top in {
            file.parts[0]
            for file in distribution.files or ()
            if file.parts[0] not in ("..", "__pycache__")
        }:
            if not (place / top).exists():
                (place / top).symlink_to(Path(str(distribution.locate_file(top))).resolve())
    return place


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    keys = "key name=trainer scopes=data,push-weights,operate\n"
    with live_server(write_model(tmp_path_factory.mktemp("server")), keys=keys) as running:
        yield running


def python(alone: Path, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run isolated: no site packages, no variables; `alone` is first in its path."""
    begin = f"import sys; sys.path.insert(0, {str(alone)!r})\n"
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TLT_"))
    }
    return completed(
        [sys.executable, "-I", "-S", "-c", begin + script, *arguments], env=environment
    )


def test_client_alone_works_and_imports_no_heavy_package(alone: Path, server: LiveServer) -> None:
    done = python(alone, ASKS, server.url)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    assert {"tlt_client", "httpx", "msgspec"} <= loaded and not loaded & set(HEAVY)


def test_heavy_packages_are_missing_next_to_the_client(alone: Path) -> None:
    script = f"""
for name in {HEAVY}:
    try: __import__(name)
    except ModuleNotFoundError as error: print(error.name)
"""
    assert python(alone, script).stdout.split() == list(HEAVY), "else the test before shows nothing"


def files(directory: Path) -> set[str]:
    return {
        str(path.relative_to(directory))
        for path in directory.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_every_file_of_the_client_is_installed(alone: Path) -> None:
    there = files(alone / "tlt_client")
    assert {
        "__init__.py",
        "py.typed",
        "channels/broadcast.py",
        "rpc/rollout_pb2.py",
        "rpc/rollout_pb2.pyi",
        "rpc/rollout.proto",
    } <= there
    assert there == files(CLIENTS / "tlt_client")
    assert not any((alone / "tlt_client" / name).is_symlink() for name in there)
    assert (alone / "tlt_client" / "rpc" / "rollout.proto").read_bytes() == (
        CLIENTS / "proto" / "rollout.proto"
    ).read_bytes()


def test_no_module_of_the_client_imports_torch(alone: Path) -> None:
    """Every module of `tlt_client` is imported by name, where torch could be loaded."""
    modules = [
        ".".join(Path("tlt_client", name).with_suffix("").parts).removesuffix(".__init__")
        for name in sorted(files(alone / "tlt_client"))
        if name.endswith(".py")
    ]
    script = (
        "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)\n"
        "import tlt_client\nprint('torch' in sys.modules, tlt_client.__file__)"
    )
    done = completed(
        [sys.executable, "-c", script, *modules],
        cwd=alone,
        env={**os.environ, "PYTHONPATH": str(alone)},
    )
    assert (done.returncode, done.stdout.strip()) == (
        0,
        f"False {alone / 'tlt_client' / '__init__.py'}",
    ), done.stderr
    assert len(modules) >= 10
