"""The engine as the frontend sees it.

It sends batches of `GenerateRequest`s and commands to the engine, and turns the engine's events
into outputs of each sequence, answers, and typed errors when the engine cannot answer. Called by
`generation`, `weights`, `rollouts`, the dialects and the composition root; it calls none of them.
"""
