"""Manners of a process: threads, garbage, private files, faults and its end. No torch."""
