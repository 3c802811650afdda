"""Writes drafters as files: a new one for a target, or one in the layouts of other engines."""
