"""Kernels of TLT Server: each clever one has a slow twin in plain code."""
