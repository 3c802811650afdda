"""Records between processes: commands, events, and the files that both sides read. No torch."""
