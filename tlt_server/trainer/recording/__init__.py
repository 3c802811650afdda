"""Recorded sequences and their states: stored, sampled, and read as documents."""
