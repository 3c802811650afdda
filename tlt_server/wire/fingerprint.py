"""The fingerprint of a server's numerics: everything, next to the weights and the request, that a
token's bits depend on. Two servers with equal fingerprints and equal libraries give equal bits, at
every width.

A part changes only when bits change. No torch.
"""

from __future__ import annotations

import hashlib
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from msgspec import Struct

LIBRARIES = ("torch", "triton", "numba", "llvmlite")  # they compute, or compile what computes


class Fingerprint(Struct, frozen=True):
    leaves: Annotated[int, "slices of each long sum, added as a fixed tree"]
    dtype: Annotated[str, "of weights and KV, each if they differ"]
    architecture: Annotated[str, "of the processor"]
    numerics: Annotated[str, "the mode, the kernels' version and the library"]
    attention: Annotated[str, "the backend that computes it"] = ""
    quantization: Annotated[str, "of the target's linear maps: none or fp8"] = "none"

    def difference(self, other: Fingerprint) -> str:
        """Return the first field that differs, with both values; empty if none does."""
        for name in self.__struct_fields__:
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                return f"{name} is {mine!r} here and {theirs!r} there"
        return ""


def sources(package: str) -> str:
    """Return a digest of a package's Python files."""
    found = find_spec(package)
    assert found is not None and found.submodule_search_locations
    digest = hashlib.sha256()
    for location in found.submodule_search_locations:
        for path in sorted(Path(location).rglob("*.py")):
            content = path.read_bytes()
            digest.update(f"{path.relative_to(location)} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:12]


def libraries() -> dict[str, str]:
    """Return the versions of the installed libraries that bits depend on; of the project's own
    kernels, the digest of their files. A GPU's driver compiles no kernel, and torch's version names
    the CUDA that it was built for.
    """
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # such as Triton where there is none
            continue
    return found | {"kernels": sources("tlt_kernels")}
