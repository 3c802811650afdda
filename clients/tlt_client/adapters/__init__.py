"""Adapters: what trainers ask for that take an object instead of an address. One file each, over
`Client` and the channels alone.

Nothing of a trainer is imported before it calls, so each is importable where the trainer, and
torch, are not.
"""
