"""`tlt cache`: moves compiled kernels and measured step times between machines of one kind."""
