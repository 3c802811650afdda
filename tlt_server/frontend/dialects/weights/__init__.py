"""The native weight routes: push, commit, abort, roll back, look; parts by http and process groups.

Bodies and file ranges become commands of the weight session; the engine's reports become replies.
Only the table of dialects imports this room.
"""
