"""Exchanges between the ranks of one target: one file per way to move bytes. All give the same
bits, because no library adds.

`models.split.RankExchange` is the protocol for CPUs, implemented in `gloo.py`.
`tlt_kernels.gpu.exchange.RankPeers` is the one for GPUs: mapped windows, or NCCL in `gathered.py`.
"""
