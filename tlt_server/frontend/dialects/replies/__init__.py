"""Replies shared by several dialects: log-probs, usage, ended items, pushes and server info.

They turn results of the service into msgspec structs and the errors of routes. Every dialect may
import this room; it imports no dialect.
"""
