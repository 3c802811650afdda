"""Exchanges between the ranks of one target: one file per way that bytes move. All give the same
bits, because none lets a library add.

`models.split.RankExchange` is the protocol of CPUs, and `gloo.py` theirs. That of GPUs is
`tlt_kernels.gpu.exchange.RankPeers`: windows that they map, or `gathered.py` by NCCL.
"""
