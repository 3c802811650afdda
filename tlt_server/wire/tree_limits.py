"""The largest tree that may be drafted for one request in a step: more would gain nothing. Light,
because `tlt --help` imports it.
"""

MAX_DEPTH, MAX_WIDTH, MAX_ROWS = 64, 32, 256
