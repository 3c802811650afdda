"""Pushes into a real server over HTTP: refused without a weight root; committed, spooled, and back
after a kill.
"""

import os
import signal
from pathlib import Path

import pytest

from tests.e2e.conftest import DRAFTING
from tlt_client import Client, ServerError
from tlt_server.demo.push import perturbed_copy
from tlt_server.demo.server import ServerProcess
from tlt_server.demo.workload import TARGET

ASKED = [{"prompt": "Compute 3*4+5.", "seed": 7}]


def test_a_server_without_a_weight_root_takes_no_weights(client: Client) -> None:
    with pytest.raises(ServerError, match="--weight-root") as refused:
        client.update_weights(TARGET, "v1")
    assert refused.value.status == 403 and client.weights()["target"] == "initial"


def test_committed_weights_are_served_after_a_kill(tmp_path: Path) -> None:
    weights = perturbed_copy(TARGET, tmp_path / "root" / "v1")
    flags = (
        *DRAFTING,
        "--weight-root",
        str(tmp_path / "root"),
        "--state-dir",
        str(tmp_path / "state"),
    )
    with ServerProcess(*flags) as server, Client(server.url, timeout_s=60) as client:
        before = client.weight_checksums()
        reply = client.update_weights("v1", "v1")
        assert reply["state"] == "committed"
        assert client.update_weights("v1", "v1")["state"] == "unchanged"
        sums = client.weight_checksums()
        said = client.generate(ASKED, sampling={"max_tokens": 20}).results[0].choices[0]
        assert sums != before
        assert [(v.version, v.start) for v in said.weight_versions] == [("v1", 0)]
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait()
    (weights / "model.safetensors").unlink()
    with ServerProcess(*flags) as server, Client(server.url, timeout_s=60) as client:
        assert (
            client.weights()["target"] == client.server_info()["engine"]["weight_version"] == "v1"
        )
        assert client.weight_checksums() == sums
        again = client.generate(ASKED, sampling={"max_tokens": 20}).results[0].choices[0]
        assert (again.token_ids, again.logprobs) == (said.token_ids, said.logprobs)
