"""Builds an engine from its settings, and runs its first steps."""
