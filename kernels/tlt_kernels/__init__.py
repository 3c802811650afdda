"""The kernels: everything that the engine computes and that no library computes in a fixed order.

`cpu/` holds kernels for the host, compiled by numba; `gpu/` holds Triton kernels; `reference*.py`
hold slow twins in plain PyTorch and numpy, which the tests compare the kernels with. Every kernel
keeps one rule: the bits of a row depend on that row's own inputs only, never on the batch around
it, its index in the batch or the number of threads.
"""
