"""Settings of a server: declared once, read from flags, variables and a file."""
