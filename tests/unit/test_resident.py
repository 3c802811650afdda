"""The process of `examples.grpo.adapt` that runs verbs of `tlt` one after another."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from examples.grpo.adapt import ResidentTlt
from tlt_server.demo.workload import TARGET


@pytest.mark.slow
def test_failed_command_is_reported_and_the_process_continues(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tlt = ResidentTlt()
    with pytest.raises(subprocess.CalledProcessError) as failed:
        tlt.run("drafter", "init", "--target", str(tmp_path), "--out", str(tmp_path / "none"))
    assert failed.value.returncode == 2 and "tlt: " in capfd.readouterr().err
    tlt.run("drafter", "init", "--target", str(TARGET), "--out", str(tmp_path / "made"))
    assert (tmp_path / "made" / "model.safetensors").exists()
    assert capfd.readouterr().out == ""
    for _ in range(2):  # the second finds a process that has ended
        with pytest.raises(subprocess.CalledProcessError) as ended:
            tlt.run("drafter", "initial")
        assert ended.value.returncode == 2
