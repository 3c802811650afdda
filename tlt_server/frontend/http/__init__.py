"""HTTP as every route shares it: connections, keys, limits, bodies, replies and their description.

In come bytes and the settings of the server; out go checked bodies, callers, and replies with typed
errors. Every other room of the frontend may import this one; it imports none of them.
"""
