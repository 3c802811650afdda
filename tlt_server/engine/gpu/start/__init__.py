"""The start of a GPU engine: kernels compiled and loaded, passes made and recorded."""
