"""`tlt serve` with a planted fault: the real engine gets a GPU's error in the step that is to
compute a prompt which begins with FAULTY.

On a GPU the error is a real one, found when that step's outcome is waited for. On a CPU it is
raised, and what would lie on the GPU cannot be freed afterwards: each attempt waits for ever, as
with a context that is lost. As a program: `gpu_fault.py serve FLAGS` is the server, `gpu_fault.py
DIR` its engine.
"""

import atexit
import sys
import time

FAULTY = [21, 22, 23]
REPORTED = "an illegal memory access was encountered"

if __name__ == "__main__":
    if sys.argv[1] == "serve":
        from tlt_server import __main__, build

        build.ENGINE = (sys.executable, __file__)
        sys.exit(__main__.main(sys.argv[1:]))

    import torch

    from tlt_server.engine import process
    from tlt_server.engine.cpu import device as cpu
    from tlt_server.engine.cpu.runner import CpuRunner
    from tlt_server.engine.gpu import device as cuda
    from tlt_server.engine.gpu.runner import GpuRunner
    from tlt_server.engine.schedule.batch import Batch
    from tlt_server.wire.records import Strategy

    class Resident:
        def __del__(self) -> None:
            print("freed what lies on the GPU", file=sys.stderr, flush=True)
            time.sleep(3600)

    def is_faulty(batch: Batch) -> bool:
        return any(work.sequence.tokens[: len(FAULTY)].tolist() == FAULTY for work in batch.chunks)

    class FaultyGpuRunner(GpuRunner):
        def launch(self, batch: Batch, strategy: Strategy) -> None:
            if is_faulty(batch):
                with torch.cuda.stream(self.stream):
                    torch.zeros(4, device="cuda")[
                        torch.full((4,), 1 << 30, device="cuda")
                    ]  # out of bounds
            super().launch(batch, strategy)

    class FaultyRunner(CpuRunner):
        def launch(self, batch: Batch, strategy: Strategy) -> None:
            if is_faulty(batch):
                resident = Resident()
                atexit.register(time.sleep, 3600)
                raise torch.AcceleratorError(
                    f"CUDA error: {REPORTED}\n"
                    f"CUDA kernel errors might be asynchronously reported, {resident}."
                )
            super().launch(batch, strategy)

    cpu.CpuRunner = FaultyRunner  # type: ignore[misc]
    cuda.GpuRunner = FaultyGpuRunner  # type: ignore[misc]
    sys.exit(process.main())
