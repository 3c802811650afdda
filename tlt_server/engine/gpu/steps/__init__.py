"""A step on a GPU: its state, drafts, rows and results."""
