"""The benches of `tlt bench`: a module with `run(args)` each, and their common parts."""
