"""HTTP as every route shares it: connections, keys, limits, bodies, replies and their description.

It turns bytes and the server's settings into checked bodies, callers, and replies with typed
errors. Every other room of the frontend may import this one; it imports none of them.
"""
