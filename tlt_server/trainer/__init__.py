"""Trains the drafter: from recorded sequences to a drafter that is proven better."""
