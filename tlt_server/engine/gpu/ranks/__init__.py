"""The further ranks of a GPU engine, as rank 0 sees them."""
