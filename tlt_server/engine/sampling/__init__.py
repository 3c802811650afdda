"""Samples tokens, and masks those that may not follow."""
