"""Versions of the kernels' numerics, raised when a change moves a bit of what they compute, and
only then. `tests/engine/test_leaves.py` and `tests/kernels/test_gpu_leaves.py` hold hashes of sums;
`benchmarks/record_tests.py` (`GOLDEN`) holds hashes of whole runs on a GPU.
"""

CPU = 1
GPU = 1
