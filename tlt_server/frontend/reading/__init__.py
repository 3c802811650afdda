"""The reading process, as the frontend's loop sees it. Large bodies, conversations, texts and lists
of ids are parsed, rendered, tokenised and decoded there, and come back in frames of bounded size.

Comes in: a job's slices, with the key that asks. Goes out: one value per slice, or one typed error.
Called by every room above; the code that runs in that process is the room `reading_process`.
"""
