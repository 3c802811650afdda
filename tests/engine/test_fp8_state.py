"""Versions in FP8 where they are kept: the state directory, memory of a sleep, other servers, and
the weights in use when nothing is staged.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace as replaced
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.engine.adapters import write_adapter
from tests.engine.fp8 import BLOCKS, effective_sums, in_halves, is_map, save_in_fp8
from tests.engine.halting import done
from tests.engine.pushing import Pushable, cpu_settings, perturbed, small_request, why
from tests.engine.test_peer import KEY, Source
from tests.engine.tiny import write_eagle, write_target
from tlt_client.channels.checkpoint import INDEX
from tlt_client.quantise import SCALE_SUFFIX
from tlt_server.engine.settings import EngineSettings
from tlt_server.weights import handover
from tlt_server.weights.checksums import checksum
from tlt_server.wire.commands import HandOver, ReadWeights, Sleep, WakeUp

SINGLE = "model.safetensors"
MAP = "model.layers.0.self_attn.q_proj.weight"
ASKED = small_request(8)
PHASES = ("open", "check", "read", "fill", "spool", "done")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("fp8")
    write_target(root / "base", shape=BLOCKS)
    write_eagle(root / "drafter", shape=BLOCKS, draft_vocab=40)
    perturbed(root / "base", root / "new", 1)
    perturbed(root / "base", root / "newer", 2)
    perturbed(root / "drafter", root / "new-drafter", 3)
    save_in_fp8(root / "new", root / "new-fp8")
    return root


def settings_of(root: Path, state: Path | None = None, **fields: object) -> EngineSettings:
    given = {"quantization": "fp8", "weight_channels": "disk,http", **fields}
    return cpu_settings(
        root / "base",
        root / "drafter",
        kv_memory_mb=4,
        threads=1,
        weight_root=str(root),
        state_dir=state,
        **given,
    )


@pytest.fixture
def kept(root: Path, tmp_path: Path) -> Iterator[EngineSettings]:
    yield settings_of(root, tmp_path / "state")


def upload(engine: Pushable, tensors: dict[str, Tensor], version: str) -> Path:
    """Push by http; return the file that came."""
    folder = Path(engine.settings.state_dir or "") / "uploads" / version
    folder.mkdir(parents=True)
    save_file(tensors, folder / SINGLE)
    named = [
        {"name": name, "checksum": checksum("xxh3_128", tensor)} for name, tensor in tensors.items()
    ]
    report = engine.push(version, version, channel="http", tensors=named)
    assert report.result == "committed", why(report)
    return folder / SINGLE


def spooled(settings: EngineSettings) -> dict[str, Tensor]:
    """Return the target's tensors in the state directory, which an index lists."""
    (folder,) = (Path(settings.state_dir or "") / "weights").glob("push-*/target")
    found: dict[str, Tensor] = {}
    for name, file in json.loads((folder / INDEX).read_text())["weight_map"].items():
        with safe_open(folder / file, "pt") as opened:
            found[name] = opened.get_tensor(name)
    return found


@pytest.mark.parametrize("form", ["disk", "disk in halves", "http", "http in halves"])
def test_state_directory_is_in_fp8_and_restarts_equal(
    form: str, kept: EngineSettings, root: Path
) -> None:
    new = load_file(root / "new" / SINGLE)
    engine = Pushable(kept)
    if form.startswith("http"):
        came = upload(engine, in_halves(new) if "halves" in form else new, "v1")
        (folder,) = (Path(kept.state_dir or "") / "weights").glob("push-*/target")
        linked = [file for file in folder.glob("*.safetensors") if file.samefile(came)]
        assert bool(linked) == ("halves" in form), "only what came in FP8 is kept as it came"
    else:
        report = engine.push(root / ("new-fp8" if "halves" in form else "new"), "v1")
        assert report.result == "committed", why(report)
    sums, said = engine.checksums(), engine.run(ASKED)
    assert {name: sums[name] for name in new} == effective_sums(new)
    found, wanted = spooled(kept), in_halves(new)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].float(), tensor.float()), name
    fresh = Pushable(replace(settings_of(root), model=root / "new-fp8", quantization=None))
    assert fresh.checksums() == sums and fresh.run(ASKED) == said, "started on what was pushed"
    again = Pushable(kept)
    assert (again.info.weight_version, again.info.lost) == ("v1", {})
    assert again.checksums() == sums and again.run(ASKED) == said
    assert again.push(root / "newer", "v2").result == "committed"
    assert again.roll_back().result == "rolled_back"
    restored = Pushable(kept)
    assert restored.info.weight_version == "v1" and restored.checksums() == sums


def test_restart_after_a_kill_in_any_phase_serves_the_commit(
    kept: EngineSettings, root: Path, tmp_path: Path
) -> None:
    engine, state = Pushable(kept), Path(kept.state_dir or "")
    engine.push(root / "new", "v1")
    sums, left = engine.checksums(), list[Path]()

    def copy(phase: str) -> None:
        """Keep the state directory as a kill would leave it now."""
        left.append(tmp_path / f"{len(left)}-{phase}")
        shutil.copytree(state, left[-1])

    engine.engine.pushes.transaction.on_phase = copy
    assert engine.push(root / "new-fp8", "v2", commit=False).result == "staged"
    assert engine.push(root / "newer", "v3").result == "conflict"
    assert {path.name.partition("-")[2] for path in left} == {*PHASES}
    for directory in {path.name.partition("-")[2]: path for path in left}.values():
        again = Pushable(replace(kept, state_dir=str(directory)))
        assert (again.info.weight_version, again.info.lost) == ("v1", {})
        assert again.checksums() == sums
        assert len([*directory.glob("weights/push-*")]) == 1


def test_fp8_version_is_lost_to_a_server_without_fp8(kept: EngineSettings, root: Path) -> None:
    engine = Pushable(kept)
    engine.push(root / "new", "v1")
    sums = engine.checksums()
    other = Pushable(replace(kept, quantization="none"))
    assert other.info.weight_version == "initial" and list(other.info.lost) == ["target"]
    assert "serve a quantised target (--quantization fp8)" in other.info.lost["target"]
    again = Pushable(kept)
    assert again.info.weight_version == "v1" and again.checksums() == sums


def test_bf16_version_is_lost_to_a_server_in_fp8(kept: EngineSettings, root: Path) -> None:
    Pushable(replace(kept, quantization="none")).push(root / "new", "v1")
    other = Pushable(kept)
    assert list(other.info.lost) == ["target"]
    assert "has changed" in other.info.lost["target"]
    assert other.push(root / "new", "v2").result == "committed"
    assert Pushable(kept).info.weight_version == "v2"


def test_rollback_over_a_restart_restores_the_initial_version(
    kept: EngineSettings, root: Path
) -> None:
    engine = Pushable(kept)
    before = engine.checksums()
    engine.push(root / "new", "v1")
    assert engine.roll_back().result == "rolled_back"
    again = Pushable(kept)
    assert again.info.weight_version == "initial" and again.checksums() == before


def test_files_of_a_peer_in_fp8_give_its_version(
    kept: EngineSettings, root: Path, tmp_path: Path
) -> None:
    given = Pushable(kept)
    given.push(root / "new", "v1")
    (file,) = (Path(kept.state_dir or "") / "weights").glob("push-*/target/*.safetensors")
    source = Source(file.read_bytes())
    try:
        taker = Pushable(replace(kept, state_dir=str(tmp_path / "other"), link_port=0))
        report = taker.push(source.url, "v1", channel="peer", key=KEY)
    finally:
        source.close()
    assert report.result == "committed", why(report)
    for engine in (taker, Pushable(taker.settings)):
        assert engine.checksums() == given.checksums() and engine.run(ASKED) == given.run(ASKED)


def test_adapter_of_a_target_in_fp8_follows_its_pushes(root: Path) -> None:
    engine = Pushable(settings_of(root, max_loras=1, max_lora_rank=4))
    path, lora = write_adapter(root / "adapter", root / "base", 1), replaced(ASKED, lora="math")
    report = engine.push(path, "a1", role="adapter", adapter="math")
    assert report.result == "committed", why(report)
    before = engine.run(lora)
    assert before != engine.run(ASKED)
    engine.push(root / "new-fp8", "v1")
    assert engine.run(lora) != before
    assert engine.roll_back().result == "rolled_back" and engine.run(lora) == before


# -- servers of another quantisation ---------------------------------------------------------------


def test_fp8_is_refused_by_a_server_without_it(root: Path) -> None:
    engine = Pushable(settings_of(root, quantization="none"))
    before = engine.checksums()
    refused = engine.push(root / "new-fp8", "v1")
    assert refused.result == "weights_refused"
    assert "these weights are in FP8" in why(refused) and "--quantization fp8" in why(refused)
    bare = root / "bare"
    bare.mkdir()
    for tensors in (in_halves(load_file(root / "new" / SINGLE)), fp8_without_scales(root)):
        save_file(tensors, bare / SINGLE)
        refused = engine.push(bare, "v2")
        assert refused.result == "weights_refused" and "--quantization fp8" in why(refused)
    named = [{"name": MAP, "dtype": "float8_e4m3fn"}]
    refused = engine.push(bare, "v2", tensors=named)
    assert refused.result == "weights_refused" and "--quantization fp8" in why(refused)
    assert engine.checksums() == before


def fp8_without_scales(root: Path) -> dict[str, Tensor]:
    tensors = in_halves(load_file(root / "new" / SINGLE))
    return {name: each for name, each in tensors.items() if not name.endswith(SCALE_SUFFIX)}


def test_drafter_in_fp8_is_refused_by_name(root: Path, tmp_path: Path) -> None:
    engine = Pushable(settings_of(root))
    before, drafter = engine.checksums(), load_file(root / "new-drafter" / SINGLE)
    assert engine.push(root / "new-drafter", "d1", role="drafter").result == "committed"
    assert engine.roll_back().result == "rolled_back"
    folder = root / "drafter-fp8"
    folder.mkdir()
    for tensors in (in_halves(drafter), drafter | fp8_values(drafter)):
        save_file(tensors, folder / SINGLE)
        refused = engine.push(folder, "d2", role="drafter")
        assert refused.result == "weights_refused"
        assert "in FP8; push" in why(refused) and "_proj.weight" in why(refused)
    assert engine.checksums() == before


def fp8_values(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: each.to(torch.float8_e4m3fn) for name, each in tensors.items() if is_map(name)}


# -- without a second copy -------------------------------------------------------------------------


def test_pushes_in_place_are_quantised_and_checked_first(root: Path, tmp_path: Path) -> None:
    engine = Pushable(settings_of(root, weight_staging="none"))
    before, new = engine.checksums(), load_file(root / "new" / SINGLE)
    folder = root / "half"
    folder.mkdir()
    save_file(fp8_without_scales(root), folder / SINGLE)
    refused = engine.push(folder, "v0")
    assert refused.result == "weights_refused" and "without its scales" in why(refused)
    assert engine.checksums() == before and engine.engine.pushes.refusal is None
    for source in ("new-fp8", "new"):
        assert engine.push(root / source, source).result == "committed"
        sums = engine.checksums()
        assert {name: sums[name] for name in new} == effective_sums(new)
        assert engine.push(root / "base", f"after {source}").result == "committed"
    assert engine.checksums() == before


# -- readers ---------------------------------------------------------------------------------------


def test_reads_give_effective_weights(root: Path, tmp_path: Path) -> None:
    engine = Pushable(settings_of(root))
    engine.push(root / "new-fp8", "v1")
    new = load_file(root / "new" / SINGLE)
    engine.engine.send(ReadWeights("rows", MAP, 3))
    report = engine.report("rows")
    assert report.state.quantization == "fp8"
    rows = torch.frombuffer(bytearray(report.values), dtype=torch.float32).view(report.shape)
    wanted = in_halves(new)
    values, scales = wanted[MAP], wanted[MAP + SCALE_SUFFIX]
    assert torch.equal(rows, values[:3].float() * scales)
    engine.engine.send(HandOver("out", str(tmp_path / "out"), str(root / "drafter")))
    assert engine.report("out").result == "looked"
    written = load_file(tmp_path / "out" / handover.TARGET)
    assert torch.equal(written[handover.EMBEDDING], new["model.embed_tokens.weight"])


def test_sleeping_fp8_weights_come_back_bit_for_bit(root: Path) -> None:
    engine = Pushable(settings_of(root))
    engine.push(root / "new", "v1")
    sums, said = engine.checksums(), engine.run(ASKED)
    done(engine, Sleep("s", ["weights", "kv_cache"]))
    done(engine, WakeUp("w", ["weights", "kv_cache"]))
    assert engine.checksums() == sums and engine.run(ASKED) == said
    assert engine.roll_back().result == "rolled_back"
