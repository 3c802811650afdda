"""`tlt doctor` as a process: every check passes here, and a broken torch is a finding."""

import json
import os
import re
import socket
import sys
from pathlib import Path

import pytest

from tests.processes import completed
from tests.unit.test_doctor import expect
from tlt_server.doctor.checks import CHECKS, Finding

ROOT = Path(__file__).parents[2]


def doctor(*flags: str, **environment: str) -> tuple[int, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("TLT_")}
    path = os.pathsep.join(str(ROOT / part) for part in ("", "kernels", "clients"))
    done = completed(
        [sys.executable, "-m", "tlt_server", "doctor", *flags],
        timeout=400,
        env={**own, "PYTHONPATH": path, **environment},
    )
    assert "Traceback" not in done.stderr + done.stdout
    return done.returncode, done.stdout


def findings(output: str) -> dict[str, Finding]:
    return {entry["check"]: Finding(**entry) for entry in json.loads(output)["checks"]}


def test_every_doctor_check_passes_on_a_sound_machine() -> None:
    status, output = doctor("--json", "--port", "0")
    assert status == 0 and json.loads(output)["ok"]
    assert list(findings(output)) == [
        "settings",
        *(check.name for check in CHECKS if not check.in_child),
        *(check.name for check in CHECKS if check.in_child),
    ]
    not_ok = {name for name, finding in findings(output).items() if finding.status != "ok"}
    assert not_ok <= {"packages", "open files"}, (
        "a checkout may not be installed, a shell may limit files"
    )


@pytest.mark.long
def test_text_output_has_a_line_per_check_then_its_remedy(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        status, output = doctor(
            "--port", str(taken.getsockname()[1]), "--state-dir", "/dev/null/state"
        )
    lines = output.splitlines()
    assert status == 1 and lines[-1].startswith(
        f"2 of {len(CHECKS) + 1} checks failed: port, state directory"
    )
    place = next(i for i, line in enumerate(lines) if line.startswith("fail port"))
    assert "Address already in use" in lines[place]
    assert "remedy: choose another --host or --port" in lines[place + 1]


@pytest.mark.long
def test_warnings_are_counted_next_to_passed_checks(tmp_path: Path) -> None:
    status, output = doctor("--port", "0", "--weight-root", str(tmp_path))
    assert status == 0 and re.fullmatch(
        rf"{len(CHECKS) + 1} checks, none failed, \d with a warning", output.splitlines()[-1]
    )
    assert "warn state directory" in output


@pytest.mark.long
def test_faulty_setting_does_not_stop_the_other_checks() -> None:
    status, output = doctor("--json", "--model", "/nowhere", "--port", "0")
    assert status == 1 and "not a directory" in findings(output)["settings"].found
    assert findings(output)["settings"].remedy
    assert {*findings(output)} == {"settings", *(check.name for check in CHECKS)}
    failed = {name for name, finding in findings(output).items() if finding.status == "fail"}
    assert failed == {"settings", "tokenizer", "device", "model", "numerics", "memory"}
    for name in ("tokenizer", "device", "model"):
        expect(findings(output)[name], "fail", "not checked, as model is at fault")


@pytest.mark.parametrize(
    ("torch", "says", "memory"),
    [
        ("import os\nos.abort()\n", ("SIGABRT", "install"), "not checked"),
        pytest.param(
            "raise ImportError('libtorch.so: cannot open')\n",
            ("ImportError", "libtorch.so", "pip install"),
            "the check itself broke: ImportError",
            marks=pytest.mark.long,
        ),
    ],
    ids=["ends the process", "cannot be imported"],
)
def test_broken_torch_is_reported_as_a_failed_check(
    torch: str, says: tuple[str, ...], memory: str, tmp_path: Path
) -> None:
    (tmp_path / "torch.py").write_text(torch)
    path = map(str, (tmp_path, ROOT, ROOT / "kernels", ROOT / "clients"))
    status, output = doctor("--json", PYTHONPATH=os.pathsep.join(path))
    assert status == 1 and findings(output)["tokenizer"].status == "ok"
    expect(findings(output)["torch"], "fail", *says)
    assert findings(output)["model"].status == "fail"
    assert findings(output)["memory"].found.startswith(memory)
