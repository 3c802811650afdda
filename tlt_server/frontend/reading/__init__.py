"""The reading process, from the frontend's side. It parses, renders, tokenises and decodes large
bodies, conversations, texts and lists of ids, and returns them in frames of bounded size.

It takes a job's slices, with the key that asks, and returns one value per slice, or one typed
error. Called by every room above; the process's own code is the room `reading_process`.
"""
