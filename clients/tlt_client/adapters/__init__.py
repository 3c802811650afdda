"""Adapters for trainers that take an object instead of an address. One file each, based only on the
clients and the channels.

An adapter imports its trainer only inside functions, so it can be imported without the trainer and
without torch.
"""
