"""A padded pair on disk, in the layouts every engine loads: a sharded Hugging Face target and an
EAGLE-3 drafter next to it.

Up to five shards are on the device at a time: one is made while four are written. config.json
comes last: a directory that has one is complete.
"""

from __future__ import annotations

import json
import shutil
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from tlt_server.bench.padding.recipe import Checkpoint, Pair
from tlt_server.errors import ModelError

SHARD_BYTES = 2 * 10**9
WRITERS = 4  # shards written at once
INDEX = "model.safetensors.index.json"
OnTensor = Callable[[str, int], None]


def write(
    pair: Pair,
    directory: str | Path,
    *,
    shard_bytes: int = SHARD_BYTES,
    on_tensor: OnTensor = lambda name, size: None,
) -> None:
    """`directory`/target and `directory`/drafter. `ModelError` when something lies there.
    `on_tensor` hears each name and size in bytes.
    """
    folders = {Path(directory) / part: checkpoint for part, checkpoint in pair._asdict().items()}
    for folder in folders:
        if folder.exists() and any(folder.iterdir()):
            raise ModelError(f"{folder} is not empty; remove it or choose another directory")
    for folder, checkpoint in folders.items():
        folder.mkdir(parents=True, exist_ok=True)
        _write_tensors(checkpoint, folder, shard_bytes, on_tensor)
        _write_rest(checkpoint, folder)


def _write_tensors(
    checkpoint: Checkpoint, folder: Path, shard_bytes: int, on_tensor: OnTensor
) -> None:
    """Shards under provisional names until their number is known; a single one is
    `model.safetensors` without an index.
    """
    shards: list[list[str]] = []
    held: dict[str, Tensor] = {}
    writing = deque[Future[None]]()
    total = 0

    def flush() -> None:
        if len(writing) == WRITERS:
            writing.popleft().result()
        path = folder / f"part-{len(shards)}"
        writing.append(pool.submit(_save, list(held.items()), path))
        shards.append(list(held))
        held.clear()

    with ThreadPoolExecutor(WRITERS) as pool:
        for name, tensor in checkpoint.tensors():
            if held and sum(t.nbytes for t in held.values()) + tensor.nbytes > shard_bytes:
                flush()
            held[name] = tensor
            total += tensor.nbytes
            on_tensor(name, tensor.nbytes)
        flush()
        for each in writing:
            each.result()
    if len(shards) == 1:
        (folder / "part-0").rename(folder / "model.safetensors")
        return
    places: dict[str, str] = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        (folder / f"part-{number}").rename(folder / file)
        places |= dict.fromkeys(names, file)
    (folder / INDEX).write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=1) + "\n"
    )


def _save(tensors: list[tuple[str, Tensor]], path: Path) -> None:
    save_file({name: tensor.cpu() for name, tensor in tensors}, path, metadata={"format": "pt"})


def _write_rest(checkpoint: Checkpoint, folder: Path) -> None:
    """Tokenizer, generation config and calibration as they are, and the large config."""
    for path in sorted(checkpoint.source.iterdir()):
        if (
            path.is_file()
            and path.name not in ("config.json", INDEX)
            and not path.name.startswith("model")
        ):
            shutil.copy(path, folder)
    (folder / "config.json").write_text(json.dumps(checkpoint.config, indent=2) + "\n")
