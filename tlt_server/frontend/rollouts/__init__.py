"""Batches that outlive their connection.

Takes a validated batch with an idempotency key or `detach`; its results can be fetched any number
of times. Called by the dialects and the composition root; it calls `generation` and `http`.
"""
