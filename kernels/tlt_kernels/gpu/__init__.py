"""Triton kernels of the GPU engine: one file per operation, each with a slow twin that its tests
compare it with.

Every launch but `lora.shrink`'s takes `**PDL`, and every program calls `pdl_wait()` before it
touches what earlier kernels wrote or still read. No launch function waits for the device, and none
allocates memory in a way that a CUDA graph cannot capture.
"""
