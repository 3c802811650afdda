"""Speculation: drafters propose candidates, the tree selects the rows to verify, the target samples
its own tokens, and the walk accepts the drafts that equal them. Lossless by construction.
"""
