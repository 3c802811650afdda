"""The benchmark commands as a user runs them: exact is green, rollout reports passes that speculation saves."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def bench(name: str, file: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "tlt_server", "bench", name, "--quick", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    last = json.loads(done.stdout.strip().splitlines()[-1])
    assert json.loads(file.read_text()) == last, "the file and the last line differ"
    return dict(last)


def test_exact_finds_no_difference(tmp_path: Path) -> None:
    said = bench("exact", tmp_path / "exact.json")
    assert said["configurations"] >= 18 and said["requests"] > 500 and said["preemptions"] > 0
    assert (said["differing_tokens"], said["differing_logprob_bits"], said["scarce_without_preemption"]) == (0, 0, 0)


def test_rollout_saves_passes(tmp_path: Path) -> None:
    said = bench("rollout", tmp_path / "rollout.json")
    assert said["responses_differing"] == 0
    plain, eagle, beg = (said[f"tail/{name}"] for name in ("off", "eagle", "beg"))
    assert eagle["tokens"] == plain["tokens"] == beg["tokens"]
    assert eagle["passes"] <= plain["passes"] / 3 and beg["passes"] <= plain["passes"]
    assert eagle["accept_length"] >= 3.5 and eagle["tokens_per_pass"] >= 3 * plain["tokens_per_pass"]
    assert beg["speedup"] >= 0.4  # a floor for a busy machine
