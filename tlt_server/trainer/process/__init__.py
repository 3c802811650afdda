"""The trainer process: takes what was recorded, decides when to train, and does a round of it."""
