"""The drafter's training: from recorded sequences to a drafter that is proven better."""
