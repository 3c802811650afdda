"""Kernels for the host, compiled by numba. They read float32 CPU tensors in place."""
