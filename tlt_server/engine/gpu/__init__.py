"""The engine's device half on a GPU: what the host decides goes down in one copy, what came of it
comes up in one copy.

`runner.py` launches, `graphs.py` replays, `extend.py` and `drafts/` are what is captured,
`state.py` is what lives on the device.
"""
