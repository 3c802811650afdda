"""The training itself: network, objectives, packs, steps and checkpoints."""
