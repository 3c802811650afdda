"""The Responses API: a conversation in items, in one reply or in typed events.

A request is translated to a chat request, so the same template, tools, structures and limits hold.
"""
