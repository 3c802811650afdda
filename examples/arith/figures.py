"""`figures.json` in the pair's directory: one JSON object, one key per script; the model card is
rendered from it.
"""

from __future__ import annotations

import json
from pathlib import Path


def record_figures(path: Path, key: str, figures: dict) -> None:
    """Set `key` and keep the other keys."""
    known = json.loads(path.read_text()) if path.exists() else {}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(known | {key: figures}, indent=2) + "\n")
