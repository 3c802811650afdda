"""Weight and adapter changes, and reads of weights, between two steps."""
