"""Chooses the sequences of the next step, and applies the results of a step. No tensors."""
