"""PTX of the exchange kernels, compiled for compute capability 9.0 without a GPU: run it without
Triton's interpreter, `python -m tests.kernels.for_hopper`. It prints one JSON object, PTX by name.
"""

from __future__ import annotations

import json

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from tlt_kernels.gpu.compiler import FixedTarget
from tlt_kernels.gpu.exchange import exchange_add_rms_norm, gather, peer_windows, window_bytes
from tlt_kernels.gpu.norm import add_rms_norm
from tlt_kernels.gpu.variants import listed, preload

RANKS, ROWS, HIDDEN = 2, 4, 3584


class Target(FixedTarget):
    def get_current_stream(self, device: int) -> int:
        return 0


def main() -> None:
    driver.set_active(Target(GPUTarget("cuda", 90, 32)))
    whole = torch.zeros(window_bytes(ROWS * HIDDEN) + 1024, dtype=torch.uint8)
    own = whole[-whole.data_ptr() % 1024 :][: window_bytes(ROWS * HIDDEN)]
    peers = peer_windows(0, [own.data_ptr()] * RANKS, own)
    part, residual = peers.room(0).view(1, ROWS, HIDDEN), torch.zeros(ROWS, HIDDEN)
    weight, out = (torch.zeros(*shape, HIDDEN, dtype=torch.bfloat16) for shape in ((), (ROWS,)))
    with listed() as found:
        exchange_add_rms_norm(peers, part, residual, weight, 1e-6, out_RH=out)
        gather(peers, part, torch.zeros(RANKS, ROWS, HIDDEN))
        add_rms_norm(torch.zeros(RANKS, ROWS, HIDDEN), residual, weight, 1e-6)
    texts = {}
    for variant in found:
        asm = preload(variant).asm
        texts[variant.kernel] = {"ptx": asm["ptx"], "layouts": asm["ttgir"]}
    print(json.dumps(texts))


if __name__ == "__main__":
    main()
