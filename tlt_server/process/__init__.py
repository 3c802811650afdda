"""Process hygiene: threads, garbage collection, private files, faults and shutdown. No torch."""
