"""Samples tokens, and says which tokens may follow."""
