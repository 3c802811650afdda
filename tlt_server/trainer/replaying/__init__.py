"""Replays drafters on recorded responses, with the serving functions."""
