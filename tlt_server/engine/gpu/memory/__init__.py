"""The memory of a GPU: its budget, the KV, hidden states and captured graphs."""
