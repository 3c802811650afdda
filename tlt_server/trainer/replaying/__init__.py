"""Replays of drafters on recorded responses, with the functions that serve."""
