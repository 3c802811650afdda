"""Records sequences and their hidden states for the training of a drafter."""
