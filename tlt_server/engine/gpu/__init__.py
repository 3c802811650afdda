"""The engine's device half on a GPU: one upload per step carries the host's decisions, and one copy
brings the results back.

`runner.py` launches, `memory/graphs.py` replays, `steps/extend.py` and `steps/drafts/` are
captured, `steps/state.py` holds the device's state.
"""
