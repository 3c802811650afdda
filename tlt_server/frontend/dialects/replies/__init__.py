"""Replies that several dialects give: log-probs, usage, ended items, pushes and server info.

In come results of the service; out go msgspec structs and the errors that routes raise. Every
dialect may import this room; it imports no dialect.
"""
