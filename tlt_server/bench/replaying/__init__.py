"""Parts of `tlt bench record` and `tlt bench replay`."""
