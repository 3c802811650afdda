"""Drafters as files: a new one for a target, and one in the layouts of other engines."""
