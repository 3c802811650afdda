"""Batches that outlive their connection.

Comes in: a validated batch with an idempotency key or `detach`. Goes out: its results, as often as
they are fetched. Called by the dialects and the composition root; it calls `generation` and `http`.
"""
