"""Triton kernels of the GPU engine: one file per operation, each with a slow twin that its tests
compare it with.

Every launch takes `**PDL`, every program calls `pdl_wait()` before it touches what earlier kernels
wrote or still read. Nothing here allocates behind a caller's back in a way that a CUDA graph could
not capture, nothing waits for the device.
"""
