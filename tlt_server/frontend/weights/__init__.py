"""Weight updates as trainers open, fill and end them.

Comes in: manifests, parts of versions, and groups to join, from any dialect. Goes out: one
`WeightReport` or one typed error for each. Called by the dialects through the service; it calls
`link`.
"""
