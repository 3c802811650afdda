"""Host memory that a push of files takes while it is staged, in addition to the model that it
fills: some buckets, not some files.

Measured in a process of its own by the kernel's count of its peak (VmHWM), as torch or a library
may bypass any allocator.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

TENSORS, TENSOR_MIB = 32, 12
# A bucket of 64 MiB and the tensor that exceeds it, what is computed of one tensor, and libraries
# that load meanwhile.
BUCKETS_MIB = 160

CHILD = """
import sys
from pathlib import Path
from types import SimpleNamespace
import torch
from tlt_client.channels import Intake
from tlt_client.channels.disk import DiskReceiver
from tlt_client.channels.http import HttpReceiver
from tlt_server.wire.commands import Manifest, TensorEntry
from tlt_server.weights.parts import Live, Target
from tlt_server.weights.spool import Spool
from tlt_server.weights.candidate import Candidate
from tlt_server.weights.storage import Options
from tlt_server.weights.storage import Free, Storage

channel, root, keeps = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
tensors, mib = int(sys.argv[4]), int(sys.argv[5])

class Network:
    config = SimpleNamespace(tied_embeddings=False, quantization=None)

    def __init__(self):
        self.tensors = {f"t{i:02}": torch.zeros(mib * 2**18) for i in range(tensors)}

    def parameters(self):
        return self.tensors

    def blank(self):
        return Network()

def memory(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    [line] = [line for line in lines if line.startswith(name)]
    return int(line.split()[1]) // 1024

torch.set_num_threads(1)
entries = [TensorEntry(name=f"t{i:02}") for i in range(tensors)]
manifest = Manifest(path="new", channel=channel, tensors=entries)
spool = Spool(root / "state", "model") if keeps == "spooled" else None
if spool:
    spool.begin()
receive = {
    "disk": lambda m: DiskReceiver(m, Intake(root=root)),
    "http": lambda m: HttpReceiver(m, Intake(uploads=root)),
}[channel]
place = Storage(None, lambda: Free(2**40, 0, 0), torch.device("cpu"), None)
candidate = Candidate(Options(spool=spool, storage=place))
live = Live(Target("old", Network(), {}))
before = memory("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
receiver = receive(manifest)
parts = candidate.take(manifest, live, lambda _: receiver, lambda phase: None)
assert parts is not None and parts.target.network.tensors["t00"].max() > 0
assert mib << 20 < receiver.buffers.host <= (64 + mib) << 20 and receiver.buffers.device == 0
print(memory("VmHWM") - before - tensors * mib)
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("memory")
    (root / "new").mkdir()
    save_file(
        {f"t{i:02}": torch.rand(TENSOR_MIB * 2**18) for i in range(TENSORS)},
        root / "new/model.safetensors",
    )
    return root


@pytest.mark.parametrize(
    ("channel", "keeps"),
    [
        ("http", "spooled"),
        pytest.param("disk", "spooled", marks=pytest.mark.long),
        pytest.param("disk", "not spooled", marks=pytest.mark.long),
        pytest.param("http", "not spooled", marks=pytest.mark.long),
    ],
)
def test_staging_files_needs_memory_for_buckets_only(channel: str, keeps: str, root: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHILD, channel, root, keeps, str(TENSORS), str(TENSOR_MIB)],
        timeout=400,
        text=True,
        capture_output=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < BUCKETS_MIB, (
        f"{done.stdout.strip()} MiB in addition to a model of {TENSORS * TENSOR_MIB} MiB"
    )
