"""The kernels: everything the engine computes that a library does not compute in a fixed order.

`cpu/` holds compiled kernels for the host (numba); `reference*.py` their slow twins in plain
PyTorch, which the tests compare them with. Every kernel keeps one rule: a row's bits depend on that
row's own inputs only, never on the batch around it, its place in the batch or the number of
threads.
"""
