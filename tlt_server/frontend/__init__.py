"""HTTP in front, msgpack to the engine behind; asyncio, no torch.

Reading order: `app` (routes) -> `dialects` (what is asked) -> `requests`, `validation` (one request
type) -> `generation` (one batch)
-> `engine_client`, `supervisor`, `engine_link` (to the engine and back) -> `sequence`, `text` (tokens to choices).
"""
