"""The kernels: everything that the engine computes and that no library computes in a fixed order.

`cpu/` has kernels for the host, compiled by numba; `gpu/` has Triton kernels; `reference*.py` have
slow twins in plain PyTorch and numpy, which tests compare with the kernels. Every kernel keeps one
rule: the bits of a row depend only on that row's inputs, never on the batch, the row's index in it
or the number of threads.
"""
