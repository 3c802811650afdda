"""A push may have any fault: live weights are exactly the old or the new ones, and a failure says
why and changes no token.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.pushing import Pushable, perturbed
from tests.engine.tiny import HIDDEN, VOCAB, write_eagle, write_target
from tlt_client.channels.errors import ContentRefused
from tlt_client.channels.source import Source
from tlt_server.engine.settings import EngineSettings
from tlt_server.events import WeightReport
from tlt_server.records import GenerateRequest, Sampling

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
REFUSED = ("weights_refused", "forbidden", "push_failed", "conflict")
EMBEDDING, QUERY, NORM = (
    "model.embed_tokens.weight",
    "model.layers.2.self_attn.q_proj.weight",
    "model.norm.weight",
)


class Bench:
    """The engine, what it serves, and a directory per case with a good copy of new weights to
    spoil.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.weights = root, root / "weights"
        self.weights.mkdir()
        write_target(root / "base")
        write_eagle(root / "drafter")
        perturbed(root / "base", root / "good", 1)
        perturbed(root / "drafter", root / "good-drafter", 2)
        self.engine = Pushable(
            EngineSettings(
                model=str(root / "base"),
                device="cpu",
                drafter=str(root / "drafter"),
                policy="off",
                kv_memory_mb=16,
                weight_root=str(self.weights),
            )
        )
        self.transaction = self.engine.engine.pushes.transaction
        self.said, self.sums = self.speak(), self.transaction.versions.live.live_sums()
        self.count = 0
        self.new_sums = self.engine.push(self.copy("good"), "good").checksums
        assert self.engine.roll_back().result == "rolled_back"

    def speak(self) -> Any:
        return self.engine.run(
            GenerateRequest(
                id="r",
                token_ids=[5, 6, 7],
                seed=3,
                sampling=Sampling(max_tokens=5, ignore_eos=True),
            )
        )

    def copy(self, name: str) -> Path:
        self.count += 1
        return Path(shutil.copytree(self.root / name, self.weights / f"case-{self.count}"))

    def check(self, report: WeightReport) -> None:
        """Old after a refusal, new after a success; then old again for the next case."""
        live = self.transaction.versions.live.live_sums()
        if report.result == "committed":
            assert {name: live[name] for name in self.new_sums} == self.new_sums
            assert self.engine.roll_back().result == "rolled_back"
            live = self.transaction.versions.live.live_sums()
        else:
            assert report.result in REFUSED and report.error and len(report.error[1]) > 20, report
        assert live == self.sums and self.speak() == self.said
        assert self.transaction.push is None and self.engine.engine.gate.state == "open"


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("faults"))


def edit(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(directory / FILE)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / FILE)


def header_size(directory: Path) -> int:
    with open(directory / FILE, "rb") as file:
        return int(struct.unpack("<Q", file.read(8))[0])


def shard(directory: Path, parts: int = 3) -> dict[str, str]:
    """The same tensors in several files with an index."""
    tensors = load_file(directory / FILE)
    names, weight_map = sorted(tensors), {}
    for i in range(parts):
        file = f"model-{i}.safetensors"
        save_file({name: tensors[name] for name in names[i::parts]}, directory / file)
        weight_map |= dict.fromkeys(names[i::parts], file)
    (directory / FILE).unlink()
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return weight_map


def declared(directory: Path, bench: Bench) -> list[dict[str, object]]:
    return [{"name": name, "checksum": value} for name, value in bench.new_sums.items()]


# -- damaged files


@pytest.mark.parametrize(
    "cut",
    [0, 1, 7, 8, 9, 0.02, 0.05, 0.1, *(i / 14 for i in range(2, 14)), 0.99, 0.999, -9, -4, -2, -1],
)
def test_a_truncated_file(cut: float, bench: Bench) -> None:
    directory = bench.copy("good")
    size = (directory / FILE).stat().st_size
    os.truncate(directory / FILE, int(size * cut) if isinstance(cut, float) else cut % size)
    report = bench.engine.push(directory, "v")
    assert report.result == "weights_refused" and FILE in report.error[1]  # type: ignore[index]
    bench.check(report)


@pytest.mark.parametrize("place", range(30))
def test_a_bit_flipped_in_the_header(place: int, bench: Bench) -> None:
    directory = bench.copy("good")
    flip(directory / FILE, place * (8 + header_size(directory)) // 30, place % 7)
    bench.check(bench.engine.push(directory, f"header-{place}"))


@pytest.mark.parametrize("place", range(24))
def test_a_bit_flipped_in_the_data_with_checksums_declared(place: int, bench: Bench) -> None:
    directory = bench.copy("good")
    start, size = 8 + header_size(directory), (directory / FILE).stat().st_size
    flip(directory / FILE, start + place * (size - start - 1) // 23, place % 8)
    report = bench.engine.push(directory, f"data-{place}", tensors=declared(directory, bench))
    assert report.result == "weights_refused"
    bench.check(report)


def flip(file: Path, at: int, bit: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1 << bit
    file.write_bytes(data)


@pytest.mark.parametrize("name", [EMBEDDING, QUERY, NORM, "model.layers.5.mlp.down_proj.weight"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite(name: str, value: float, bench: Bench) -> None:
    directory = bench.copy("good")
    edit(directory, lambda tensors: tensors[name].view(-1).__setitem__(-1, value))
    report = bench.engine.push(directory, "v")
    assert (
        report.result == "weights_refused"
        and name in report.error[1]
        and "NaN or infinite" in report.error[1]
    )  # type: ignore[index]
    bench.check(report)


TENSORS: dict[str, Callable[[dict[str, torch.Tensor]], object]] = {
    "transposed": lambda t: t.update({EMBEDDING: t[EMBEDDING].t()}),
    "a row more": lambda t: t.update({QUERY: torch.cat([t[QUERY], t[QUERY][:1]])}),
    "a row less": lambda t: t.update({QUERY: t[QUERY][:-1]}),
    "flat": lambda t: t.update({QUERY: t[QUERY].reshape(-1)}),
    "another dimension": lambda t: t.update({NORM: t[NORM][None]}),
    "empty": lambda t: t.update({NORM: t[NORM][:0]}),
    "one number": lambda t: t.update({NORM: t[NORM][0].clone()}),
    "double": lambda t: t.update({QUERY: t[QUERY].double()}),
    "whole numbers": lambda t: t.update({QUERY: t[QUERY].int()}),
    "bytes": lambda t: t.update({QUERY: t[QUERY].to(torch.uint8)}),
    "truth values": lambda t: t.update({NORM: t[NORM] > 0}),
    "eight bits": lambda t: t.update({NORM: t[NORM].to(torch.float8_e4m3fn)}),
    "complex": lambda t: t.update({NORM: t[NORM].to(torch.complex64)}),
    "no embedding": lambda t: t.pop(EMBEDDING),
    "no bias": lambda t: t.pop("model.layers.0.self_attn.q_proj.bias"),
    "no norm": lambda t: t.pop(NORM),
    "only one": lambda t: [t.pop(name) for name in list(t) if name != NORM],
    "a layer missing": lambda t: [t.pop(name) for name in list(t) if ".layers.3." in name],
    "a layer more": lambda t: t.update(
        {name.replace(".5.", ".6."): x.clone() for name, x in t.items() if ".layers.5." in name}
    ),
    "a stranger": lambda t: t.update({"model.stranger": torch.ones(2)}),
    "another name": lambda t: t.update({"transformer.wte": t.pop(EMBEDDING)}),
    "a head of its own": lambda t: t.update({"lm_head.weight": t[EMBEDDING] + 1}),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_that_do_not_fit(name: str, bench: Bench) -> None:
    directory = bench.copy("good")
    edit(directory, TENSORS[name])
    report = bench.engine.push(directory, "v")
    assert report.result == "weights_refused"
    bench.check(report)


LARGE = 2**31  # bytes that are declared and, in a file with holes, take no space


def declare(directory: Path, name: str) -> None:
    """Write the file again, with a tensor of many zeros."""
    with open(directory / FILE, "rb") as file:
        header = json.loads(file.read(header_size(directory) + 8)[8:])
    header.setdefault(name, {})
    end = 0
    for tensor, said in (
        (tensor, said) for tensor, said in header.items() if tensor != "__metadata__"
    ):
        size = LARGE if tensor == name else said["data_offsets"][1] - said["data_offsets"][0]
        header[tensor] = (
            said
            | {"dtype": "F32", "data_offsets": [end, end + size]}
            | ({"shape": [LARGE // 4]} if tensor == name else {})
        )
        end += size
    text = json.dumps(header).encode()
    with open(directory / FILE, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


@pytest.mark.parametrize(
    "name, said",
    [
        (QUERY, "expected"),
        ("lm_head.weight", "more elements than any"),
        ("model.layers.0.rotary_emb.inv_freq", "more elements than any"),
    ],
)
def test_a_tensor_larger_than_the_model_has_is_refused_before_it_is_read(
    name: str, said: str, bench: Bench
) -> None:
    directory = bench.copy("good")
    declare(directory, name)
    report = bench.engine.push(directory, "v")
    assert report.result == "weights_refused" and "read" not in report.phases
    assert all(word in report.error[1] for word in (FILE, repr(name), f"[{LARGE // 4}]", said))  # type: ignore[index]
    bench.check(report)


def test_so_is_one_that_comes_by_http(bench: Bench, tmp_path: Path) -> None:
    engine = Pushable(
        replace(bench.engine.settings, weight_channels="http", state_dir=str(tmp_path))
    )
    part = shutil.copytree(bench.root / "good", tmp_path / "uploads" / "u") / FILE
    for file in part.parent.iterdir():
        if file != part:
            file.unlink()
    declare(part.parent, QUERY)
    report = engine.push("u", "v", channel="http", tensors=declared(part.parent, bench))
    assert report.result == "weights_refused" and "read" not in report.phases
    assert report.error and all(
        word in report.error[1] for word in (f"part '{FILE}'", repr(QUERY), f"[{LARGE // 4}]")
    )


def test_a_tied_head_that_agrees_is_welcome(bench: Bench) -> None:
    directory = bench.copy("good")
    edit(directory, lambda tensors: tensors.update({"lm_head.weight": tensors[EMBEDDING].clone()}))
    report = bench.engine.push(directory, "tied")
    assert report.result == "committed"
    bench.check(report)


# -- shards


def rewrite(change: Callable[[dict[str, str]], object]) -> Callable[[Path], None]:
    def spoil(directory: Path) -> None:
        weight_map = json.loads((directory / INDEX).read_text())["weight_map"]
        change(weight_map)
        (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))

    return spoil


SHARDS: dict[str, Callable[[Path], object]] = {
    "shard missing": lambda d: (d / "model-1.safetensors").unlink(),
    "shard empty": lambda d: (d / "model-1.safetensors").write_bytes(b""),
    "shard truncated": lambda d: os.truncate(d / "model-2.safetensors", 5000),
    "shard of another": lambda d: shutil.copy(d / "model-0.safetensors", d / "model-1.safetensors"),
    "index not JSON": lambda d: (d / INDEX).write_text("{"),
    "index a list": lambda d: (d / INDEX).write_text("[]"),
    "index deep": lambda d: (d / INDEX).write_text("[" * 100_000),
    "index without a map": lambda d: (d / INDEX).write_text("{}"),
    "index with a number": rewrite(lambda m: m.update({NORM: 3})),
    "index leads up": rewrite(lambda m: m.update({NORM: "../base/model.safetensors"})),
    "index leads away": rewrite(lambda m: m.update({NORM: "/etc/passwd"})),
    "index with a null byte": rewrite(lambda m: m.update({NORM: "model\0.safetensors"})),
    "index lacks one": rewrite(lambda m: m.pop(NORM)),
    "index has one more": rewrite(lambda m: m.update({"model.stranger": "model-0.safetensors"})),
    "index misplaces one": rewrite(lambda m: m.update({NORM: m[EMBEDDING], EMBEDDING: m[NORM]})),
    "index with many lists": lambda d: (d / INDEX).write_text(
        '{"a":[' + ",".join(["[]"] * 10**6) + "]}"
    ),
    "index not text": lambda d: (d / INDEX).write_bytes(b"\xff\xfe\x00"),
}


@pytest.mark.parametrize("name", SHARDS)
def test_shards_and_index_that_do_not_fit(name: str, bench: Bench) -> None:
    directory = bench.copy("good")
    shard(directory)
    SHARDS[name](directory)
    report = bench.engine.push(directory, "v")
    assert report.result == "weights_refused"
    bench.check(report)


def test_whole_shards_are_welcome(bench: Bench) -> None:
    directory = bench.copy("good")
    shard(directory)
    report = bench.engine.push(directory, "sharded")
    assert report.result == "committed"
    bench.check(report)


# -- where weights come from


def outside(bench: Bench) -> Path:
    return bench.root / "good"  # next to the weight root


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


# -- while it is read


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


# -- the staging thread


@pytest.mark.parametrize("error", [MemoryError, SystemExit, KeyboardInterrupt, RecursionError])
@pytest.mark.parametrize("phase", ["open", "read", "check", "fill", "spool", "done"])
def test_a_staging_thread_that_dies(
    phase: str, error: type[BaseException], bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(entered: str) -> None:
        if entered == phase:
            raise error("killed by the test")

    monkeypatch.setattr(bench.transaction, "on_phase", die)
    report = bench.engine.push(bench.copy("good"), f"dies-{phase}")
    assert report.result == "push_failed" and error.__name__ in report.error[1]  # type: ignore[index]
    bench.check(report)


@pytest.mark.parametrize("phase", ["open", "read", "check", "fill", "spool", "done"])
def test_a_push_during_a_push_and_an_abort_in_each_phase(
    phase: str, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, seen = bench.engine, []

    def interfere(entered: str) -> None:
        if entered == phase and not seen:
            seen.append(entered)
            before = len(engine.reports)
            while len(engine.reports) < before + 3:
                time.sleep(0.001)  # the loop steps on; it answers what is sent below

    monkeypatch.setattr(bench.transaction, "on_phase", interfere)
    first = engine.send_push(bench.copy("good"), f"first-{phase}")
    engine.until(lambda: bool(seen), phase)
    other = engine.push(bench.copy("good"), "other")
    assert other.result == "conflict" and f"'first-{phase}' is being pushed" in other.error[1]  # type: ignore[index]
    assert [engine.abort(version).result for version in ("other", f"first-{phase}")] == [
        "not_found",
        "aborted",
    ]
    report = engine.report(first)
    assert report.result == "conflict" and "aborted" in report.error[1]  # type: ignore[index]
    bench.check(report)


# -- manifests and the drafter


MANIFESTS: dict[str, list[dict[str, object]]] = {
    "another dtype": [{"name": QUERY, "dtype": "bfloat16"}],
    "another shape": [{"name": QUERY, "shape": [HIDDEN, HIDDEN + 1]}],
    "a checksum of other bytes": [{"name": QUERY, "checksum": "sha256:" + "0" * 64}],
    "an xxh3 of other bytes": [{"name": QUERY, "checksum": "xxh3:" + "0" * 16}],
    "an unknown kind of checksum": [{"name": QUERY, "checksum": "crc32:00000000"}],
    "a checksum without a kind": [{"name": QUERY, "checksum": "0" * 64}],
    "a tensor that is not there": [{"name": "model.stranger"}],
    "a tensor twice": [{"name": QUERY}, {"name": QUERY}],
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_that_says_otherwise(name: str, bench: Bench) -> None:
    changed = {str(entry["name"]) for entry in MANIFESTS[name]}
    tensors = [
        *MANIFESTS[name],
        *({"name": other} for other in bench.new_sums if other not in changed),
    ]
    report = bench.engine.push(bench.copy("good"), "v", tensors=tensors)
    assert report.result == "weights_refused"
    bench.check(report)


@pytest.mark.parametrize(
    "dtype, said",
    [
        ("float99", "float64, float32, float16, bfloat16"),
        ("Tensor", "use one of"),
        ("quint4x2", "use one of"),
        ("complex128", "use one of"),
        ("float64", "takes it as bfloat16 or float16 or float32"),
        ("torch.int64", "takes it as bfloat16 or float16 or float32"),
    ],
)
def test_a_declared_dtype_that_is_not_taken_is_refused_before_anything_is_read(
    dtype: str, said: str, bench: Bench
) -> None:
    tensors = [
        {"name": name, "dtype": dtype if name == QUERY else "float32"} for name in bench.new_sums
    ]
    report = bench.engine.push(bench.copy("good"), "v", tensors=tensors)
    assert report.result == "weights_refused" and "read" not in report.phases
    assert all(word in report.error[1] for word in (repr(QUERY), dtype, said))  # type: ignore[index]
    bench.check(report)


def test_a_manifest_that_leaves_one_out(bench: Bench) -> None:
    report = bench.engine.push(
        bench.copy("good"), "v", tensors=[{"name": name} for name in bench.new_sums if name != NORM]
    )
    assert report.result == "weights_refused" and NORM in report.error[1]  # type: ignore[index]
    bench.check(report)


@pytest.mark.parametrize(
    "field, value",
    [
        ("hidden_size", 2 * HIDDEN),
        ("num_hidden_layers", 5),
        ("rms_norm_eps", 1e-3),
        ("tie_word_embeddings", False),
        ("architectures", ["LlamaForCausalLM"]),
        ("hidden_act", "gelu"),
    ],
)
def test_a_config_of_another_model(field: str, value: object, bench: Bench) -> None:
    directory = bench.copy("good")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, field: value}))
    report = bench.engine.push(directory, "v")
    assert report.result == "weights_refused" and "config.json" in report.error[1]  # type: ignore[index]
    bench.check(report)


DRAFTERS: dict[str, Callable[[dict[str, torch.Tensor]], object]] = {
    "not finite": lambda t: t["midlayer.mlp.down_proj.weight"].fill_(float("nan")),
    "a map out of the vocabulary": lambda t: t["d2t"].fill_(VOCAB),
    "a map that contradicts itself": lambda t: t["t2d"].logical_not_(),
    "half a map": lambda t: t.pop("t2d"),
    "another draft vocabulary": lambda t: t.update({"lm_head.weight": t["lm_head.weight"][:-1]}),
    "no fusion": lambda t: t.pop("fc.weight"),
    "the target's tensors": lambda t: t.update({NORM: torch.ones(HIDDEN)}),
}


@pytest.mark.parametrize("role", ["drafter", "all"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_a_drafter_that_does_not_fit(name: str, role: str, bench: Bench) -> None:
    """A good target in the same transaction must not become live either."""
    drafter = bench.copy("good-drafter")
    edit(drafter, DRAFTERS[name])
    places = (
        {"path": drafter}
        if role == "drafter"
        else {"path": bench.copy("good"), "drafter_path": str(drafter)}
    )
    report = bench.engine.push(places.pop("path"), "v", role=role, **places)
    assert report.result == "weights_refused"
    bench.check(report)


def test_a_calibration_that_is_none(bench: Bench) -> None:
    drafter = bench.copy("good-drafter")
    (drafter / "calibration.safetensors").write_bytes(b"none")
    report = bench.engine.push(drafter, "v", role="drafter")
    assert report.result == "weights_refused" and "calibration" in report.error[1]  # type: ignore[index]
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
