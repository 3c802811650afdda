"""Judges a candidate: figures of replayed cycles, and the test that it must pass."""
