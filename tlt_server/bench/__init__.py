"""Benchmarks behind `tlt bench`."""
