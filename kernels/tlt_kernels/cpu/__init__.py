"""Kernels for the host, compiled by numba. They take float32 CPU tensors and read them where they
lie.
"""
