"""Parts of `tlt bench fleet`: a clock that jumps, and replicas that take measured times."""
