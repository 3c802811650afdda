"""Records of the kernels that starts needed, in a folder of Triton's cache: with a record, the next
start of the same engine knows what to compile before it has loaded anything.

A record's name is a digest of everything that its list depends on. It never decides what a kernel
computes: Triton finds its entries by their own keys and compiles missing ones.
"""

from __future__ import annotations

import base64
import hashlib
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from tlt_server.process.private import private_directory, private_file
from tlt_server.wire.fingerprint import sources

if TYPE_CHECKING:  # it loads Triton, which `tlt doctor` does not need
    from tlt_kernels.gpu.variants import Variant

FOLDER = "tlt"
MAX_BYTES = 64 * 2**20
# A record grows up to this while its engine serves: more kernels would take a start too long.
MAX_KERNELS = 1024
_recorded = count()  # starts of this process


class RecordedKernel(Struct, frozen=True, array_like=True):
    module: str
    kernel: str
    specialization: str
    entry: str  # its directory in Triton's cache


class KernelRecord(Struct, frozen=True, forbid_unknown_fields=True):
    toolchain: dict[str, str]  # what the compiled kernels depend on
    engine: str  # what else the list depends on: a digest
    # An engine has started with them on this machine; an import has not.
    started: bool
    kernels: tuple[RecordedKernel, ...]

    @property
    def name(self) -> str:
        return record_name(self.toolchain, self.engine)

    def complete(self, cache: Path) -> bool:
        """Return True if Triton's cache has all of its kernels."""
        return all(any((cache / k.entry).glob("__grp__*.json")) for k in self.kernels)


def entry_name(digest: str) -> str:
    """Return the directory name, in Triton's cache, of the kernel with this hash."""
    return base64.b32encode(bytes.fromhex(digest)).decode().rstrip("=")


def record_name(toolchain: Mapping[str, str], engine: str) -> str:
    """Return the record's file name."""
    content = msgspec.json.encode([sorted(toolchain.items()), engine])
    return f"{hashlib.blake2b(content, digest_size=16).hexdigest()}.json"


def cache_directory() -> Path:
    """Return the directory of Triton's cache."""
    from triton import knobs

    return Path(knobs.cache.dir)


def toolchain() -> dict[str, str]:
    """Return the versions and devices that compiled kernels depend on, as in error messages."""
    import torch
    import triton
    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.runtime.cache import triton_key

    on_gpu = torch.cuda.is_available()
    major, minor = torch.cuda.get_device_capability() if on_gpu else (0, 0)
    variables = sorted(get_cache_invalidating_env_vars().items())
    return {
        "gpu": torch.cuda.get_device_name() if on_gpu else "none",
        "capability": f"{major}.{minor}",
        "torch": str(torch.__version__),
        "cuda": str(torch.version.cuda),
        "triton": f"{triton.__version__} ({_digest(triton_key())})",
        "variables": " ".join(f"{name}={value}" for name, value in variables),
        "kernels": sources("tlt_kernels.gpu"),
    }


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def read_record(cache: Path, name: str) -> KernelRecord | None:
    """Return a record, or None. A damaged record is reported and not used."""
    path = cache / FOLDER / name
    if not path.exists():
        return None
    try:
        with path.open("rb") as file:
            record = msgspec.json.decode(file.read(MAX_BYTES), type=KernelRecord)
        if record.name != name:
            raise ValueError(f"the file holds the record {record.name}")
    except (OSError, ValueError, RecursionError) as error:
        print(f"tlt: {path} is not used, and made again: {error}", file=sys.stderr)
        return None
    return record


def records(cache: Path) -> Iterator[KernelRecord]:
    """Yield the readable records of a cache."""
    for path in sorted((cache / FOLDER).glob("*.json")):
        if record := read_record(cache, path.name):
            yield record


def write_record(cache: Path, record: KernelRecord) -> None:
    """Write a record atomically. On a full disk only the record is lost."""
    path = cache / FOLDER / record.name
    draft = path.with_suffix(f".new{os.getpid()}")
    try:
        private_directory(cache / FOLDER, parents=True, exist_ok=True)
        with open(draft, "wb", opener=private_file) as file:
            file.write(msgspec.json.encode(record))
        os.replace(draft, path)
    except OSError as error:
        print(f"tlt: {path} cannot be written: {error.strerror}", file=sys.stderr)


def extend_record(cache: Path, name: str, found: Mapping[Variant, str]) -> None:
    """Add kernels to a record, if it exists and has room. `found`: the hash of each."""
    record = read_record(cache, name)
    if record is None:
        return
    added = _recorded_kernels(found)
    kernels = tuple(dict.fromkeys((*record.kernels, *added)))
    if len(record.kernels) < len(kernels) <= MAX_KERNELS:
        write_record(cache, msgspec.structs.replace(record, kernels=kernels))


def _recorded_kernels(found: Mapping[Variant, str]) -> list[RecordedKernel]:
    return [RecordedKernel(*variant, entry_name(digest)) for variant, digest in found.items()]


@contextmanager
def recorded(
    cache: Path, known: KernelRecord | None, toolchain: Mapping[str, str], engine: str
) -> Iterator[None]:
    """Record the known kernels and those that the block loads, if they are new. Only the first
    start of a process is recorded.
    """
    from tlt_kernels.gpu.variants import loaded

    with loaded() as found:
        yield
    if next(_recorded):
        return  # what this process has loaded before was not seen to be loaded
    before = dict.fromkeys(known.kernels) if known else {}
    kernels = tuple(before | dict.fromkeys(_recorded_kernels(found)))
    record = KernelRecord(dict(toolchain), engine, True, kernels)
    if known is None or not known.started or set(known.kernels) != set(kernels):
        write_record(cache, record)
