"""The native weight routes: push, commit, abort, roll back, look; parts by http and process groups.

In come bodies and file ranges, which become commands of the weight session. Out go reports of the
engine as replies. Only the table of dialects imports this room.
"""
