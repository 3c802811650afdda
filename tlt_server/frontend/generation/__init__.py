"""Runs a request from its JSON to its choices.

Takes a body of the native form, into which each dialect translates its own; returns token events,
finished and failed items, and their texts. Called by `rollouts`, the dialects and the service; it
calls `link` and `http`.
"""
