"""Triton kernels of the GPU engine: one file per operation, each tested against a slow twin.

Every launch but `lora.shrink`'s takes `**PDL`, and every program calls `pdl_wait()` before it
touches memory that earlier kernels write or still read. No launch function waits for the device or
allocates memory in a way that a CUDA graph cannot capture.
"""
