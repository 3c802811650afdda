"""Versions of the kernels' numerics, raised when a change moves a bit of what they compute, and
only then. `tests/engine/test_leaves.py` and `tests/kernels/test_gpu_leaves.py` hold hashes of sums;
records of `tlt bench exact` have the hash of a whole run on their machine.
"""

CPU = 1
GPU = 1
