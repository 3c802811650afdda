"""Shapes of the dialect `sglang`, and its form of generation: what trainers that drive SGLang send
and expect.
"""
