"""Adapters for trainers that take an object instead of an address. One file each, over the clients
and the channels alone.

An adapter imports its trainer inside functions only, so it can be imported where the trainer, and
torch, are not installed.
"""
