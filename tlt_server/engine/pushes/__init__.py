"""New weights, adapters and readings of weights, between two steps."""
