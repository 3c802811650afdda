"""The same models on a GPU: weights as checkpoints hold them ([out, in], fused side by side), a
step's rows as device tensors.

A family's file says what is special about it (`LayerShape`); this package computes it with
`tlt_kernels.gpu`. Nothing here waits for the device or depends on values, so a pass can be captured
in a CUDA graph.
"""
