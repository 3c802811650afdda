"""Loading: an ordinary Hugging Face directory becomes a filled model. Reads safetensors only.

Called at start-up, for targets and drafters. Every name, shape, dtype and value is checked before
it is copied; any fault is a `ModelError` with file, tensor, expected and found value.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tlt_client.quantise import SCALE_SUFFIX
from tlt_server.errors import ModelError
from tlt_server.models.config import ModelConfig, read_json, token_ids
from tlt_server.models.decoder import Decoder
from tlt_server.models.draft_networks import ARCHITECTURES
from tlt_server.models.numerics import Numerics
from tlt_server.models.quantised import E4M3, check_blocks, check_scales
from tlt_server.models.shards import Stored, in_fp8
from tlt_server.models.split import WHOLE, Split
from tlt_server.settings.server import DtypeName

GPU_READERS = 4  # threads that read and copy; one alone leaves most of the bus idle
STORAGE_DTYPES = tuple(getattr(torch, name) for name in get_args(DtypeName))


def load_target(
    directory: str | Path,
    *,
    numerics: Numerics,
    config: ModelConfig | None = None,
    attention: str = "cpu",
    page_size: int = 16,
    feature_layers: tuple[int, ...] = (),
    split: Split = WHOLE,
    random: bool = False,
) -> Decoder:
    """Return the target model in `directory`, filled and self-tested. Raises `ModelError` or
    `StartupError`.

    `config`: the directory's own, with `max_position` lowered to the served length; None reads it.
    `random`: draw the weights.
    """
    model = empty_target(
        directory,
        numerics=numerics,
        config=config,
        attention=attention,
        page_size=page_size,
        feature_layers=feature_layers,
        split=split,
    )
    fill_target(model.parameters(), model.config, None if random else Path(directory))
    model.self_test()
    return model


def empty_target(
    directory: str | Path,
    *,
    numerics: Numerics,
    config: ModelConfig | None = None,
    attention: str = "cpu",
    page_size: int = 16,
    feature_layers: tuple[int, ...] = (),
    split: Split = WHOLE,
) -> Decoder:
    """Return the model that the directory's JSON files describe, without values; on torch's `meta`
    device it takes no memory.
    """
    directory = Path(directory)
    config = eos_token_ids(config or ModelConfig.read(directory), directory)
    if config.architecture in ARCHITECTURES:
        raise ModelError(
            f"{directory} holds a drafter ({config.architecture}); give it as --drafter, and its "
            "target as --model"
        )
    return split.build(
        lambda split: Decoder(
            config,
            numerics=numerics,
            attention=attention,
            page_size=page_size,
            feature_layers=feature_layers,
            split=split,
        )
    )


def eos_token_ids(config: ModelConfig, directory: Path) -> ModelConfig:
    """Return the config with the end tokens of `generation_config.json`, if that exists."""
    generation = directory / "generation_config.json"
    if not generation.exists():
        return config
    return replace(
        config,
        eos_token_ids=token_ids(read_json(generation), str(generation)) or config.eos_token_ids,
    )


def own_dtype(directory: Path) -> str:
    """Return the dtype of the checkpoint's embedding, as torch names it; without one, of some
    tensor.
    """
    files = tensor_files(directory)
    name = "model.embed_tokens.weight" if "model.embed_tokens.weight" in files else min(files)
    with _open(files[name]) as file:
        dtype = file.get_slice(name)[:0].dtype
    return str(dtype).removeprefix("torch.") if dtype in STORAGE_DTYPES else "float32"


def gpu_dtype(own: str) -> str:
    """Return the GPU's default dtype. `own`: the checkpoint's type."""
    return own if own in ("bfloat16", "float16") else "bfloat16"


def unread(config: ModelConfig) -> set[str]:
    """Return the tensors of a checkpoint of this model that are ignored."""
    return {"lm_head.weight"} if config.tied_embeddings else set()


def fill_target(
    parameters: Mapping[str, Stored], config: ModelConfig, checkpoint: Path | None
) -> None:
    """Fill a target from a directory; None: with random weights."""
    if checkpoint is None:
        draw(parameters)
    else:
        fill(parameters, checkpoint, ignored=unread(config))


def draw(parameters: Mapping[str, Stored]) -> None:
    """Fill every tensor with normal values of size 1 / sqrt(inputs), so that activations keep the
    size of a trained model's: for benches of shapes, which may be larger than the disk. Values
    depend on the tensor's name, shape and kind of device, not on the ranks that hold it. The
    largest tensor is in memory twice meanwhile.
    """
    for name, stored in parameters.items():
        digest = hashlib.blake2b(name.encode(), digest_size=7).digest()
        generator = torch.Generator(stored.device).manual_seed(int.from_bytes(digest, "big"))
        values = torch.empty(stored.shape, dtype=stored.dtype, device=stored.device)
        inputs = stored.shape[-1] if stored.dim() > 1 else 1
        stored.copy_(values.normal_(0.0, inputs**-0.5, generator=generator))


def fill(
    parameters: Mapping[str, Stored], directory: Path, *, ignored: Collection[str] = ()
) -> None:
    """Copy every tensor of the directory into the view of that name. All views must be filled, and
    only `ignored` tensors may be left over.
    """
    files = tensor_files(directory)
    check_names(parameters, files, ignored, directory)
    quantised = any(scale_name(name) in files for name in parameters)
    inference = torch.is_inference_mode_enabled()  # a property of each thread

    def copy(path: Path, names: Sequence[str]) -> None:
        with torch.inference_mode(inference):
            for name, tensor in read_tensors(path, names):
                stored, scales = parameters[name], scale_name(name)
                values: Any = tensor.to(stored.device)
                check_layout(name, values.shape, values.dtype, stored, path)
                check_pair(name, values.dtype, files, path, quantised and in_fp8(stored))
                if scales in files:
                    ((_, found),) = read_tensors(files[scales], [scales])
                    where = f"{path} and {files[scales].name}" if files[scales] != path else path
                    values = check_blocks(name, values, found.to(stored.device), where)
                else:
                    check_finite(name, values, path)
                stored.copy_(values)

    on_gpu = any(parameter.is_cuda for parameter in parameters.values())
    readers = GPU_READERS if on_gpu else 1
    with ThreadPoolExecutor(readers) as pool:
        for path in sorted(set(files.values())):
            names = [name for name in parameters if files[name] == path]
            parts = [names[first::readers] for first in range(readers)]
            # A CPU's threads are busy with the one copy.
            list((pool.map if on_gpu else map)(partial(copy, path), parts))


def check_files(
    parameters: Mapping[str, Stored], directory: Path, *, ignored: Collection[str] = ()
) -> None:
    """Raise the errors of `fill` that the files' headers reveal: names, shapes, dtypes, missing or
    truncated files. Reads no values.
    """
    files = tensor_files(directory)
    check_names(parameters, files, ignored, directory)
    quantised = any(scale_name(name) in files for name in parameters)
    for path in sorted(set(files.values())):
        with _open(path) as file:
            for name in (name for name in parameters if files[name] == path):
                shape, dtype = _header(file, name)
                check_layout(name, shape, dtype, parameters[name], path)
                check_pair(name, dtype, files, path, quantised and in_fp8(parameters[name]))
                if scale_name(name) in files:
                    at = files[scale_name(name)]
                    with _open(at) as other:
                        check_scales(name, shape, *_header(other, scale_name(name)), at)


def check_names(
    parameters: Mapping[str, Stored],
    files: Mapping[str, Path | str],
    ignored: Collection[str],
    directory: Path | str,
) -> None:
    """Check that `files` (tensor name -> file) has every parameter, and nothing else but `ignored`,
    scales of weights in FP8, and rotary tables.
    """
    scales = {scale_name(name): in_fp8(stored) for name, stored in parameters.items()}
    for name in files:
        if not scales.get(name, True):
            raise ModelError(
                f"{files[name]}: tensor {name!r} is of a weight that is not in FP8 here; correct "
                "'quantization_config' in config.json, and its 'modules_to_not_convert'"
            )
    known = {*parameters, *ignored, *scales}
    unexpected = [
        name for name in files if name not in known and not name.endswith("rotary_emb.inv_freq")
    ]
    missing = [name for name in parameters if name not in files]
    if missing:
        raise ModelError(
            f"{directory}: tensor {missing[0]!r} is missing{_more(missing)}, expected shape "
            f"{list(parameters[missing[0]].shape)}; the checkpoint is incomplete or of another "
            "architecture: "
            "download it again or correct config.json"
        )
    if unexpected:
        name = unexpected[0]
        raise ModelError(
            f"{files[name]}: tensor {name!r} has no place in this architecture{_more(unexpected)}; "
            "config.json does not describe this checkpoint: correct its 'architectures' and sizes"
        )


def tensor_files(directory: Path) -> dict[str, Path]:
    """Return the file of each tensor, by the index if there is one."""
    index = directory / "model.safetensors.index.json"
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        shards = weight_map.values() if isinstance(weight_map, dict) else [None]
        if not isinstance(weight_map, dict) or not all(
            isinstance(shard, str) and Path(shard).name == shard for shard in shards
        ):
            raise ModelError(
                f"{index}: 'weight_map' must give each tensor a file name in this directory; "
                "download the index again"
            )
        listed: dict[Path, list[str]] = {}
        for name, shard in weight_map.items():
            listed.setdefault(directory / shard, []).append(name)
        for path, names in listed.items():
            lost = sorted(set(names) - set(tensor_names(path)))
            if lost:
                raise ModelError(
                    f"{path}: tensor {lost[0]!r} is missing{_more(lost)}, but the index places it "
                    "there; "
                    "download the shard again"
                )
        return {name: directory / shard for name, shard in weight_map.items()}
    single = directory / "model.safetensors"
    if not single.exists():
        others = sorted(path.name for path in directory.glob("*.bin"))
        remedy = (
            f"convert {others[0]} to safetensors"
            if others
            else "point to a directory with model.safetensors or its index"
        )
        raise ModelError(f"{single}: the file is missing; {remedy}")
    return dict.fromkeys(tensor_names(single), single)


def tensor_names(path: Path) -> list[str]:
    with _open(path) as file:
        return list(file.keys())


def read_tensors(path: Path, names: Iterable[str]) -> Iterable[tuple[str, Tensor]]:
    with _open(path) as file:
        for name in names:
            try:
                yield name, file.get_tensor(name)
            except (SafetensorError, OSError, RuntimeError) as error:
                raise ModelError(
                    f"{path}: tensor {name!r} cannot be read ({error}); download the file again"
                ) from None


def read_tensor(directory: Path, name: str) -> Tensor:
    """Return one tensor of a checkpoint's directory."""
    files = tensor_files(directory)
    if name not in files:
        raise ModelError(f"{directory}: tensor {name!r} is missing; download the checkpoint again")
    ((_, tensor),) = read_tensors(files[name], [name])
    return tensor


def scale_name(weight: str) -> str:
    return weight + SCALE_SUFFIX


def dtypes_for(parameter: Stored) -> tuple[torch.dtype, ...]:
    """Return the dtypes in which its values may be stored."""
    if not parameter.is_floating_point():
        return (parameter.dtype,)
    return (*STORAGE_DTYPES, E4M3) if in_fp8(parameter) else STORAGE_DTYPES


def check_layout(
    name: str, shape: Sequence[int], dtype: torch.dtype, expected: Stored, path: Path | str
) -> None:
    if list(shape) != list(expected.shape):
        raise ModelError(
            f"{path}: tensor {name!r} has shape {list(shape)}, expected {list(expected.shape)}; "
            "config.json and checkpoint do not belong together"
        )
    known = dtypes_for(expected)
    if dtype not in known:
        raise ModelError(
            f"{path}: tensor {name!r} has dtype {dtype}, expected {' or '.join(map(str, known))}; "
            "convert the checkpoint"
        )


def check_pair(
    name: str, dtype: torch.dtype, names: Collection[str], path: Path | str, needed: bool
) -> None:
    """Check that a weight in FP8 has scales, and no other. `names`: of all tensors; `needed`: it
    has to be in FP8.
    """
    scaled = scale_name(name) in names
    if (dtype == E4M3) != scaled or (needed and not scaled):
        has = "and scales" if scaled else f"and no tensor {scale_name(name)!r}"
        raise ModelError(
            f"{path}: tensor {name!r} has dtype {dtype} {has}; values in {E4M3} and their scales "
            "belong together: download the checkpoint again, or correct 'modules_to_not_convert' "
            "in config.json"
        )


def check_tensor(name: str, tensor: Tensor, expected: Stored, path: Path | str) -> None:
    check_layout(name, tensor.shape, tensor.dtype, expected, path)
    check_finite(name, tensor, path)


def check_finite(name: str, tensor: Tensor, path: Path | str) -> None:
    if tensor.is_floating_point() and not torch.isfinite(tensor).all():
        bad = int((~torch.isfinite(tensor)).sum())
        raise ModelError(
            f"{path}: tensor {name!r} holds {bad} NaN or infinite values of {tensor.numel()}, "
            "expected none; "
            "the training run diverged or the file is damaged: use an earlier checkpoint"
        )


def _header(file: safe_open, name: str) -> tuple[list[int], torch.dtype]:
    header = file.get_slice(name)
    return header.get_shape(), header[:0].dtype


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError:
        raise ModelError(f"{path}: the file is missing; download the checkpoint again") from None
    except (SafetensorError, OSError) as error:
        raise ModelError(
            f"{path}: not a whole safetensors file ({error}); it is truncated or damaged: download "
            "it again"
        ) from None


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
