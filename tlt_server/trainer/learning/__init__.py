"""Trains: network, objectives, packs, steps and checkpoints."""
