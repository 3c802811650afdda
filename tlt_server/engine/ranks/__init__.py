"""The ranks of a target that several processes share."""
