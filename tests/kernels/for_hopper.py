"""PTX of the exchange kernels, compiled for compute capability 9.0 without a GPU: run it without
Triton's interpreter, `python -m tests.kernels.for_hopper`. It prints one JSON object, PTX by name
and way.
"""

from __future__ import annotations

import json

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from tlt_kernels.gpu.compiler import FixedTarget
from tlt_kernels.gpu.exchange import Way, WindowSizes, peer_windows, window_bytes
from tlt_kernels.gpu.norm import add_rms_norm
from tlt_kernels.gpu.variants import Variant, listed, preload

RANKS, ROWS, HIDDEN = 2, 4, (3584, 5120)


class Target(FixedTarget):
    def get_current_stream(self, device: int) -> int:
        return 0


def main() -> None:
    driver.set_active(Target(GPUTarget("cuda", 90, 32)))
    texts = {}
    for hidden in HIDDEN:
        for way in Way:
            for variant in variants(hidden, way):
                asm = preload(variant).asm
                name = f"{variant.kernel} {way.value} {hidden}"
                texts[name] = {"ptx": asm["ptx"], "layouts": asm["ttgir"]}
    print(json.dumps(texts))


def variants(hidden: int, way: Way) -> list[Variant]:
    landing = way.landed(RANKS) * ROWS * hidden
    size = window_bytes(WindowSizes(ROWS * hidden, landing))
    whole = torch.zeros(size + 1024, dtype=torch.uint8)
    own = whole[-whole.data_ptr() % 1024 :][:size]
    peers = peer_windows(0, [own.data_ptr()] * RANKS, own, landing=landing)
    part, residual = peers.room(0).view(1, ROWS, hidden), torch.zeros(ROWS, hidden)
    weight, out = (torch.zeros(*shape, hidden, dtype=torch.bfloat16) for shape in ((), (ROWS,)))
    with listed() as found:
        peers.add_rms_norm(part, residual, weight, 1e-6, out_RH=out, way=way)
        if hidden == HIDDEN[0]:
            peers.gather(part, torch.zeros(RANKS, ROWS, hidden))
        add_rms_norm(torch.zeros(RANKS, ROWS, hidden), residual, weight, 1e-6)
    return [*found]


if __name__ == "__main__":
    main()
