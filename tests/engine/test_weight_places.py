"""Places of weights to push: paths outside the root, links, and files that change during a read."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.pushing import Pushable, cpu_settings, why
from tests.engine.test_file_faults import FILE, INDEX, Bench, bench, shard
from tlt_client.channels.errors import ContentRefused
from tlt_client.channels.source import Source

__all__ = ["bench"]  # fixtures


def linked(make: Callable[[Path, Path], object]) -> Callable[[Bench], str]:
    """A case directory spoiled with a link out of the root."""

    def place(bench: Bench) -> str:
        directory = bench.copy()
        make(directory, bench.outside)
        return str(directory)

    return place


def replaced(path: Path, target: Path | str) -> None:
    path.unlink()
    path.symlink_to(target)


def link(bench: Bench, target: Path | None) -> Path:
    """Return a link below the weight root; None: to itself."""
    link = bench.free("link")
    link.symlink_to(target or link)
    return link


PLACES: dict[str, Callable[[Bench], str]] = {
    "next to the root": lambda bench: str(bench.outside),
    "up and out": lambda bench: "../new",
    "down, up and out": lambda bench: f"{bench.copy().name}/../../new",
    "the system": lambda bench: "/etc",
    "a null byte": lambda bench: "case\0",
    "nothing": lambda bench: "",
    "not there": lambda bench: "nowhere",
    "a very long name": lambda bench: "x" * 5000,
    "a file": lambda bench: str(bench.copy() / FILE),
    "an empty directory": lambda bench: ".",
    "a link out": lambda bench: str(link(bench, bench.outside)),
    "a link out on the way": lambda bench: str(link(bench, bench.root) / "new"),
    "a link to itself": lambda bench: str(link(bench, None)),
    "a file that links out": linked(lambda d, out: replaced(d / FILE, out / FILE)),
    "a file that links out, relatively": linked(
        lambda d, out: replaced(d / FILE, "../../new/model.safetensors")
    ),
    "a config that links out": linked(
        lambda d, out: replaced(d / "config.json", out / "config.json")
    ),
    "an index that links out": linked(lambda d, out: (d / INDEX).symlink_to(out / "config.json")),
    "a link to nothing": linked(lambda d, out: replaced(d / FILE, "nothing")),
    "a device": linked(lambda d, out: replaced(d / FILE, "/dev/zero")),
    "a pipe": linked(lambda d, out: ((d / FILE).unlink(), os.mkfifo(d / FILE))),
    "a directory for a file": linked(lambda d, out: ((d / FILE).unlink(), (d / FILE).mkdir())),
}


@pytest.mark.parametrize("name", PLACES)
def test_directory_without_weights_is_refused(name: str, bench: Bench) -> None:
    bench.said(PLACES[name](bench))


def test_socket_in_place_of_a_file_is_refused(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = bench.copy()
    (directory / FILE).unlink()
    monkeypatch.chdir(directory)  # a socket's path must be short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(FILE)
        bench.said(directory)


def test_links_inside_the_weight_root_are_followed(bench: Bench) -> None:
    """Lay files out as a model hub's cache lays out its snapshots."""
    blobs, directory = bench.copy(), bench.copy()
    replaced(directory / FILE, f"../{blobs.name}/{FILE}")
    assert bench.ends(directory, version="linked").result == "committed"


class Raced(Source):
    """Another process acts between the check of a path and its opening."""

    act: Callable[[], object] | None = None

    def _open(self, path: Path) -> tuple[int, os.stat_result]:
        act, self.act = self.act, None
        if act is not None:
            act()
        return super()._open(path)


def test_link_made_between_check_and_opening_is_not_followed(bench: Bench) -> None:
    directory = bench.copy()
    source = Raced(bench.weights, str(directory))
    source.act = lambda: replaced(directory / FILE, bench.outside / FILE)
    with pytest.raises(ContentRefused, match="cannot be opened"):
        source.read(FILE)
    directory = bench.copy()
    source = Raced(bench.weights, str(directory))
    source.act = lambda: link_out(directory, bench.outside)
    with pytest.raises(ContentRefused, match="cannot be opened"):
        source.read(FILE)


def swap(directory: Path, other: Path) -> None:
    directory.rename(directory.with_name(directory.name + "-gone"))
    shutil.copytree(other, directory)


def touch(file: Path) -> None:
    with open(file, "r+b") as opened:
        opened.seek(-4, os.SEEK_END)
        opened.write(b"\0\0\0\0")
    os.utime(file, ns=(1, 1))


def link_out(directory: Path, out: Path) -> None:
    shutil.rmtree(directory)
    directory.symlink_to(out)


MEANWHILE: dict[str, Callable[[Path, Path], object]] = {
    "written": lambda d, out: touch(next(iter(sorted(d.glob("model*.safetensors"))))),
    "truncated": lambda d, out: os.truncate(next(iter(sorted(d.glob("model*.safetensors")))), 100),
    "grown": lambda d, out: (
        next(iter(sorted(d.glob("model*.safetensors")))).open("ab").write(b"more")
    ),
    "removed": lambda d, out: shutil.rmtree(d),
    "replaced": swap,
    "linked out": link_out,
}


@pytest.mark.parametrize("phase", ["read", "check", "spool"])
@pytest.mark.parametrize("name", MEANWHILE)
def test_directory_changed_while_read_leaves_one_whole_version(
    name: str, phase: str, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, done = bench.copy(), []
    shard(directory)

    def meddle(entered: str) -> None:
        if entered == phase and not done:
            done.append(entered)
            MEANWHILE[name](directory, bench.outside)

    monkeypatch.setattr(bench.engine.engine.pushes.transaction, "on_phase", meddle)
    bench.said(directory, version=f"meanwhile-{name}-{phase}")
    assert done, "the shards read and those that stand there do not belong together"


def opened(bench: Bench, **fields: Any) -> Pushable:
    return Pushable(cpu_settings(bench.root / "base", kv_memory_mb=4, **fields))


def test_directory_without_its_marker_is_refused(bench: Bench) -> None:
    engine = opened(bench, weight_root=str(bench.weights), weight_marker="STABLE")
    directory = bench.copy()
    report = engine.push(directory, "v")
    assert report.result == "weights_refused" and "'STABLE'" in why(report)
    (directory / "STABLE").touch()
    assert engine.push(directory, "v").result == "committed"
    drafter = bench.copy("new-drafter")
    assert engine.push(drafter, "v", role="drafter").result == "weights_refused"


def test_push_by_directory_needs_a_weight_root(bench: Bench) -> None:
    report = opened(bench).push(bench.copy(), "v")
    assert report.result == "forbidden" and "--weight-root" in why(report)
