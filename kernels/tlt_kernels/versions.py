"""Versions of the kernels' numerics, raised when a change moves a bit of what they compute, and
only then. `tests/engine/test_leaves.py` holds hashes that notice it.
"""

CPU = 1
GPU = 1
