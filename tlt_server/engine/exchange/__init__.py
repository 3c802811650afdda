"""Exchanges between the ranks of one target: one file per way that bytes move. All give the same
bits, because none lets a library add.

`models.split.RankExchange` is the protocol. `gloo.py` is for CPUs.
"""
