"""The engine's device half on a CPU."""
