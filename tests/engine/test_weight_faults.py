"""A push may have any fault in its files: live weights are exactly the old or the new ones, and a
failure says why and changes no token.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.engine.faulty_pushes import (
    EMBEDDING,
    FILE,
    INDEX,
    NORM,
    QUERY,
    Bench,
    declared,
    edit,
    header_size,
    shard,
)
from tests.engine.pushing import Pushable


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("faults"))


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
