"""The same models on a GPU: weights as in checkpoints ([out, in], fused side by side), a step's
rows as device tensors.

`ModelConfig.layer_shape` says what is special about a family; this package computes it with
`tlt_kernels.gpu`. Nothing here waits for the device or depends on values, so a pass can be captured
in a CUDA graph.
"""
