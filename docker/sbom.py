"""Writes the software bill of materials (CycloneDX 1.6) of the image's Python packages from the
lock: name, version and the SHA-256 of every file that may be installed.

Run by `make lock` after docker/requirements.lock has changed.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

LOCK, SBOM = (Path(__file__).with_name(name) for name in ("requirements.lock", "sbom.cdx.json"))
PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^ ;\\]+)(?: ; ([^\\]+?))?(?: \\)?$", re.MULTILINE)


def document(lock: str) -> dict[str, Any]:
    """Return the bill for the text of a lock."""
    pins = [*PIN.finditer(lock)]
    ends = [*(pin.start() for pin in pins[1:]), len(lock)]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": {"type": "container", "name": "tlt-server"}},
        "components": [
            _component(pin, lock[pin.end() : end]) for pin, end in zip(pins, ends, strict=True)
        ],
    }


def _component(pin: re.Match[str], rest: str) -> dict[str, Any]:
    name, version, marker = pin.groups()
    where = f"pkg:pypi/{name.lower()}@{version}"
    hashes = [f"sha256:{digest}" for digest in re.findall(r"--hash=sha256:([0-9a-f]{64})", rest)]
    properties = [{"name": "tlt:file", "value": digest} for digest in hashes]
    if marker:
        properties.append({"name": "tlt:marker", "value": marker})
    return {
        "type": "library",
        "bom-ref": where if not marker else f"{where}#{marker}",
        "name": name,
        "version": version,
        "purl": where,
        "properties": properties,
    }


if __name__ == "__main__":
    SBOM.write_text(json.dumps(document(LOCK.read_text()), indent=1) + "\n")
