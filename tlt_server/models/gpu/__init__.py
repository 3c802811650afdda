"""The same models on a GPU: weights as in checkpoints ([out, in], fused side by side), a step's
rows as device tensors.

A family's file describes its differences (`LayerShape`); this package computes with
`tlt_kernels.gpu`. Nothing here waits for the device or depends on values, so a pass can be captured
in a CUDA graph.
"""
