"""Kernels for the host, compiled by numba; they take float32 CPU tensors and read them in place."""
