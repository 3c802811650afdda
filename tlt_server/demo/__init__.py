"""The demo: the arithmetic task and the shipped model pair."""
