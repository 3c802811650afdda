"""The drafter's training: pairing and losses."""
