"""Weight updates, which trainers open, fill and end.

Takes manifests, parts of versions, and groups to join, from any dialect; returns one `WeightReport`
or one typed error for each. Called by the dialects through the service; it calls `link`.
"""
