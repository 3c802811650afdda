"""Recorded sequences and their states: kept, drawn, and read as documents."""
