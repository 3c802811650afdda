"""`tlt fleet`: starts the replicas of a fleet and its gateway, and operates them. No torch."""
