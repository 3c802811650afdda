"""Scenarios of hostile clients: each attacks a running server and measures what others feel."""
