"""The engine as the frontend sees it.

Comes in: batches of `GenerateRequest`s, commands, an engine's events. Goes out: outputs of each
sequence, answers, and a typed error where the engine cannot give one. Called by `generation`,
`weights`, `rollouts`, the dialects and the composition root; it calls none of them.
"""
