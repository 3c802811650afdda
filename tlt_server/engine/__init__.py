"""The engine: one process that turns requests into tokens."""
