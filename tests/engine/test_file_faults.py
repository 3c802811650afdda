"""Faults in the directory of a push: tensors, shards, manifests, configs and drafters that are not
those of the model. The push is refused by name, and the version before it is live.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.channel_server import Server
from tlt_client.channels.checkpoint import CALIBRATION
from tlt_server.wire.events import WeightReport

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
EMBEDDING, NORM = "model.embed_tokens.weight", "model.norm.weight"
QUERY, LAST = "model.layers.1.self_attn.q_proj.weight", "model.layers.1."
HIDDEN, VOCAB = 32, 64
REFUSED = ("weights_refused", "forbidden")
Tensors = dict[str, torch.Tensor]


class Bench(Server):
    """A directory per case, with a good copy of new weights to spoil."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.weights, self.count, self.outside = root / "weights", 0, root / "new"

    def copy(self, name: str = "new") -> Path:
        return Path(shutil.copytree(self.root / name, self.free("case")))

    def free(self, name: str) -> Path:
        self.count += 1
        return self.weights / f"{name}-{self.count}"

    def ends(self, path: Path | str, **fields: Any) -> WeightReport:
        """Push; new after a success, else old; then old again for the next case."""
        report = self.engine.push(path, fields.pop("version", "spoiled"), **fields)
        if report.result == "committed":
            assert self.check() == "new" and self.engine.roll_back().result == "rolled_back"
        else:
            assert report.result in REFUSED and report.error and len(report.error[1]) > 20, report
        assert self.check() == "old"
        self.check_settled()
        return report

    def said(self, path: Path | str, **fields: Any) -> str:
        """Return the message of a push that is refused."""
        report = self.ends(path, **fields)
        assert report.result in REFUSED and report.error is not None, report
        return report.error[1]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    bench = Bench(tmp_path_factory.mktemp("files"))
    yield bench
    bench.runner.close()


def edit(directory: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(directory / FILE)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / FILE)


def header_size(directory: Path) -> int:
    with open(directory / FILE, "rb") as file:
        return int(struct.unpack("<Q", file.read(8))[0])


def shard(directory: Path, parts: int = 3) -> None:
    """Put the same tensors into several files with an index."""
    tensors = load_file(directory / FILE)
    names, weight_map = sorted(tensors), dict[str, str]()
    for i in range(parts):
        file = f"model-{i}.safetensors"
        save_file({name: tensors[name] for name in names[i::parts]}, directory / file)
        weight_map |= dict.fromkeys(names[i::parts], file)
    (directory / FILE).unlink()
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))


# -- files and tensors -----------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [0, 7, 9, 0.5, -1])
def test_truncated_file_is_named(cut: float, bench: Bench) -> None:
    directory = bench.copy()
    size = (directory / FILE).stat().st_size
    os.truncate(directory / FILE, int(size * cut) if isinstance(cut, float) else cut % size)
    assert FILE in bench.said(directory)


@pytest.mark.parametrize("place", range(10))
def test_flipped_header_bit_leaves_old_or_new_version(place: int, bench: Bench) -> None:
    directory = bench.copy()
    data = bytearray((directory / FILE).read_bytes())
    data[place * (8 + header_size(directory)) // 10] ^= 1 << place % 7
    (directory / FILE).write_bytes(data)
    bench.ends(directory, version=f"header-{place}")


TENSORS: dict[str, Callable[[Tensors], object]] = {
    "transposed": lambda t: t.update({EMBEDDING: t[EMBEDDING].t()}),
    "a row less": lambda t: t.update({QUERY: t[QUERY][:-1]}),
    "flat": lambda t: t.update({QUERY: t[QUERY].reshape(-1)}),
    "another dimension": lambda t: t.update({NORM: t[NORM][None]}),
    "empty": lambda t: t.update({NORM: t[NORM][:0]}),
    "one number": lambda t: t.update({NORM: t[NORM][0].clone()}),
    "double": lambda t: t.update({QUERY: t[QUERY].double()}),
    "bytes": lambda t: t.update({QUERY: t[QUERY].to(torch.uint8)}),
    "truth values": lambda t: t.update({NORM: t[NORM] > 0}),
    "eight bits": lambda t: t.update({NORM: t[NORM].to(torch.float8_e4m3fn)}),
    "complex": lambda t: t.update({NORM: t[NORM].to(torch.complex64)}),
    "no embedding": lambda t: t.pop(EMBEDDING),
    "no bias": lambda t: t.pop("model.layers.0.self_attn.q_proj.bias"),
    "only one": lambda t: [t.pop(name) for name in list(t) if name != NORM],
    "a layer missing": lambda t: [t.pop(name) for name in list(t) if name.startswith(LAST)],
    "a layer more": lambda t: t.update(
        {name.replace(".1.", ".2."): x.clone() for name, x in t.items() if name.startswith(LAST)}
    ),
    "another name": lambda t: t.update({"transformer.wte": t.pop(EMBEDDING)}),
    "a head of its own": lambda t: t.update({"lm_head.weight": t[EMBEDDING] + 1}),
}


@pytest.mark.parametrize("name", TENSORS)
def test_pushed_tensors_that_do_not_fit_are_refused(name: str, bench: Bench) -> None:
    directory = bench.copy()
    edit(directory, TENSORS[name])
    bench.said(directory)


def test_tied_head_equal_to_the_embedding_is_accepted(bench: Bench) -> None:
    directory = bench.copy()
    edit(directory, lambda tensors: tensors.update({"lm_head.weight": tensors[EMBEDDING].clone()}))
    assert bench.ends(directory, version="tied").result == "committed"


LARGE = 2**31  # bytes that are declared and, in a file with holes, take no space


def declare(directory: Path, name: str) -> None:
    """Write the file again, with a tensor of many zeros."""
    with open(directory / FILE, "rb") as file:
        header = json.loads(file.read(header_size(directory) + 8)[8:])
    header.pop("__metadata__", None)
    header.setdefault(name, {})
    end = 0
    for tensor, said in header.items():
        size = LARGE if tensor == name else said["data_offsets"][1] - said["data_offsets"][0]
        shape = {"shape": [LARGE // 4]} if tensor == name else {}
        header[tensor] = said | {"dtype": "F32", "data_offsets": [end, end + size]} | shape
        end += size
    text = json.dumps(header).encode()
    with open(directory / FILE, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


@pytest.mark.parametrize(
    "channel, name, said",
    [
        ("disk", QUERY, "expected"),
        ("disk", "lm_head.weight", "more elements than any"),
        ("disk", "model.layers.0.rotary_emb.inv_freq", "more elements than any"),
        ("http", QUERY, "expected"),
    ],
)
def test_tensor_larger_than_the_model_declares_is_not_read(
    channel: str, name: str, said: str, bench: Bench
) -> None:
    directory, fields = bench.copy(), {}
    if channel == "http":
        upload = bench.root / "state" / "uploads" / "large"
        upload.mkdir()
        directory = Path(shutil.move(directory / FILE, upload)).parent
        fields = {"tensors": [{"name": each, "checksum": "xxh3:0"} for each in bench.new]}
    declare(directory, name)
    path = directory if channel == "disk" else directory.name
    report = bench.ends(path, channel=channel, **fields)
    assert report.result == "weights_refused" and "read" not in report.phases
    for words in (FILE, repr(name), f"[{LARGE // 4}]", said):
        assert report.error is not None and words in report.error[1]
    if channel == "http":
        shutil.rmtree(directory)


def mapped(change: Callable[[dict[str, str]], object]) -> Callable[[Path], None]:
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
    "index with a number": mapped(lambda m: m.update({NORM: 3})),
    "index leads up": mapped(lambda m: m.update({NORM: "../base/model.safetensors"})),
    "index leads away": mapped(lambda m: m.update({NORM: "/etc/passwd"})),
    "index with a null byte": mapped(lambda m: m.update({NORM: "model\0.safetensors"})),
    "index lacks one": mapped(lambda m: m.pop(NORM)),
    "index has one more": mapped(lambda m: m.update({"model.stranger": "model-0.safetensors"})),
    "index misplaces one": mapped(lambda m: m.update({NORM: m[EMBEDDING], EMBEDDING: m[NORM]})),
    "index not text": lambda d: (d / INDEX).write_bytes(b"\xff\xfe\x00"),
}


@pytest.mark.parametrize("name", SHARDS)
def test_shards_or_index_that_do_not_fit_are_refused(name: str, bench: Bench) -> None:
    directory = bench.copy()
    shard(directory)
    SHARDS[name](directory)
    bench.said(directory)


# -- manifests, configs, drafters ------------------------------------------------------------------

MANIFESTS: dict[str, tuple[list[dict[str, object]], str]] = {
    "another shape": ([{"name": QUERY, "shape": [HIDDEN, HIDDEN + 1]}], QUERY),
    "a shape beyond memory": ([{"name": NORM, "shape": [2**40]}], f"{NORM!r} has shape [{2**40}]"),
    "a product beyond memory": ([{"name": NORM, "shape": [2**20] * 2}], "has shape [1048576, 1"),
    "a checksum without a kind": ([{"name": QUERY, "checksum": "0" * 64}], "checksum"),
    "a sha256 of other bytes": ([{"name": QUERY, "checksum": "sha256:" + "0" * 64}], "checksum"),
    "a tensor that is not there": ([{"name": "model.stranger"}], "model.stranger"),
    "one left out": ([{"name": NORM, "left out": True}], NORM),
    **{
        f"declared as {dtype}": ([{"name": QUERY, "dtype": dtype}], said)
        for dtype, said in {
            "float99": "float64, float32, float16, bfloat16",
            "Tensor": "use one of",
            "quint4x2": "use one of",
            "complex128": "use one of",
            "float64": "takes it as float32 or bfloat16 or float16",
            "torch.int64": "takes it as float32 or bfloat16 or float16",
        }.items()
    },
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifest_that_contradicts_its_files_is_refused(name: str, bench: Bench) -> None:
    entries, said = MANIFESTS[name]
    changed = {entry["name"] for entry in entries}
    tensors = [entry for entry in entries if not entry.get("left out")]
    tensors += [{"name": other} for other in bench.new if other not in changed]
    assert said in bench.said(bench.copy(), tensors=tensors)


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
def test_config_of_a_different_model_is_refused(field: str, value: object, bench: Bench) -> None:
    directory = bench.copy()
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, field: value}))
    assert "config.json" in bench.said(directory)


DRAFTERS: dict[str, Callable[[Tensors], object]] = {
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
def test_unfit_drafter_fails_a_joint_push_with_its_target(
    name: str, role: str, bench: Bench
) -> None:
    drafter = bench.copy("new-drafter")
    edit(drafter, DRAFTERS[name])
    if role == "drafter":
        bench.said(drafter, role=role)
    else:
        bench.said(bench.copy(), role=role, drafter_path=str(drafter))


def test_invalid_calibration_file_is_refused(bench: Bench) -> None:
    drafter = bench.copy("new-drafter")
    (drafter / CALIBRATION).write_bytes(b"none")
    assert "calibration" in bench.said(drafter, role="drafter")
