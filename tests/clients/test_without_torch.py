"""The client is importable where there is no torch: every module of it, the channels included."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import tlt_client


def test_no_module_of_the_client_imports_torch() -> None:
    names = [
        "tlt_client",
        *(found.name for found in pkgutil.walk_packages(tlt_client.__path__, "tlt_client.")),
    ]
    assert "tlt_client.channels.broadcast" in names
    script = (
        "import sys\nsys.modules['torch'] = None\n"  # importing it would fail
        f"import {', '.join(names)}\n"
        "print(sorted(name for name in sys.modules if name.split('.')[0] in ('transformers', "
        "'tlt_server')))"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=200
        ).stdout
        == "[]\n"
    )
