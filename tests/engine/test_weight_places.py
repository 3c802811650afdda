"""Places that weights may come from: what lies outside, links, and files that change while they are
read.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine.faulty_pushes import FILE, INDEX, Bench, declared, outside, shard
from tests.engine.pushing import Pushable
from tlt_client.channels.errors import ContentRefused
from tlt_client.channels.source import Source
from tlt_server.engine.settings import EngineSettings


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("faults"))


def linked(make: Callable[[Path, Path], object]) -> Callable[[Bench], str]:
    """A case directory spoiled with a link to what lies outside."""

    def place(bench: Bench) -> str:
        directory = bench.copy("good")
        make(directory, outside(bench))
        return str(directory)

    return place


def replaced(path: Path, target: Path | str) -> None:
    path.unlink()
    path.symlink_to(target)


def directory_link(bench: Bench) -> str:
    bench.count += 1
    link = bench.weights / f"link-{bench.count}"
    link.symlink_to(outside(bench))
    return str(link)


def link_on_the_way(bench: Bench) -> str:
    bench.count += 1
    link = bench.weights / f"way-{bench.count}"
    link.symlink_to(bench.root)
    return str(link / "good")


def loop(bench: Bench) -> str:
    bench.count += 1
    link = bench.weights / f"loop-{bench.count}"
    link.symlink_to(link)
    return str(link)


PLACES: dict[str, Callable[[Bench], str]] = {
    "next to the root": lambda bench: str(outside(bench)),
    "up and out": lambda bench: "../good",
    "down, up and out": lambda bench: f"{bench.copy('good').name}/../../good",
    "the system": lambda bench: "/etc",
    "a null byte": lambda bench: "case\0",
    "nothing": lambda bench: "",
    "not there": lambda bench: "nowhere",
    "a very long name": lambda bench: "x" * 5000,
    "a file": lambda bench: str(bench.copy("good") / FILE),
    "an empty directory": lambda bench: ".",
    "a link out": directory_link,
    "a link out on the way": link_on_the_way,
    "a link to itself": loop,
    "a file that links out": linked(lambda d, out: replaced(d / FILE, out / FILE)),
    "a file that links out, relatively": linked(
        lambda d, out: replaced(d / FILE, "../../good/model.safetensors")
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
def test_places_that_are_no_weights(name: str, bench: Bench) -> None:
    report = bench.engine.push(PLACES[name](bench), "v")
    assert report.result in ("weights_refused", "forbidden")
    bench.check(report)


def test_a_socket_is_no_file(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = bench.copy("good")
    (directory / FILE).unlink()
    monkeypatch.chdir(directory)  # a socket's path must be short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(FILE)
        report = bench.engine.push(directory, "v")
    assert report.result == "weights_refused"
    bench.check(report)


def test_links_that_stay_inside_are_followed(bench: Bench) -> None:
    """Lay files out as a model hub's cache lays out its snapshots."""
    blobs, directory = bench.copy("good"), bench.copy("good")
    replaced(directory / FILE, f"../{blobs.name}/{FILE}")
    report = bench.engine.push(directory, "linked")
    assert report.result == "committed"
    bench.check(report)


class Raced(Source):
    """Another process acts between the check of a path and its opening."""

    act: Callable[[], object] | None = None

    def _open(self, path: Path) -> tuple[int, os.stat_result]:
        act, self.act = self.act, None
        if act is not None:
            act()
        return super()._open(path)


def test_a_link_put_in_place_between_check_and_opening_is_not_followed(bench: Bench) -> None:
    directory = bench.copy("good")
    source = Raced(bench.weights, str(directory))
    source.act = lambda: replaced(directory / FILE, outside(bench) / FILE)
    with pytest.raises(ContentRefused, match="cannot be opened"):
        source.read(FILE)
    directory = bench.copy("good")
    source = Raced(bench.weights, str(directory))
    source.act = lambda: link_out(directory, outside(bench))
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
def test_a_directory_that_changes_while_it_is_read(
    name: str, phase: str, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, done = bench.copy("good"), []
    shard(directory)

    def meddle(entered: str) -> None:
        if entered == phase and not done:
            done.append(entered)
            MEANWHILE[name](directory, outside(bench))

    monkeypatch.setattr(bench.transaction, "on_phase", meddle)
    report = bench.engine.push(
        directory, f"meanwhile-{name}-{phase}", tensors=declared(directory, bench)
    )
    assert done and report.result in ("weights_refused", "forbidden"), (
        "the shards read and those that stand there do not belong together"
    )
    bench.check(report)


def test_a_directory_without_its_marker(bench: Bench, tmp_path: Path) -> None:
    engine = Pushable(
        EngineSettings(
            model=str(bench.root / "base"),
            device="cpu",
            drafter="none",
            policy="off",
            kv_memory_mb=4,
            weight_root=str(bench.weights),
            weight_marker="STABLE",
        )
    )
    directory = bench.copy("good")
    report = engine.push(directory, "v")
    assert report.result == "weights_refused" and "'STABLE'" in report.error[1]  # type: ignore[index]
    (directory / "STABLE").touch()
    assert engine.push(directory, "v").result == "committed"
    assert engine.push(bench.copy("good-drafter"), "v", role="drafter").result == "weights_refused"


def test_without_a_weight_root_nothing_is_taken(bench: Bench) -> None:
    engine = Pushable(
        EngineSettings(
            model=str(bench.root / "base"),
            device="cpu",
            drafter="none",
            policy="off",
            kv_memory_mb=4,
        )
    )
    report = engine.push(bench.copy("good"), "v")
    assert report.result == "forbidden" and "--weight-root" in report.error[1]  # type: ignore[index]
