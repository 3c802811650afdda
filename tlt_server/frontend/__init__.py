"""The frontend: HTTP and gRPC on one side, msgpack to the engine on the other; asyncio, no torch.

A request passes the rooms in this order: `app` finds its route, `http` checks caller and body,
`dialects` translates it, `generation` runs it as one batch, and `link` sends it to the engine and
returns the outputs. `rollouts` keeps batches whose client may leave, `weights` pushes weights,
`service` has what the routes share, and `rpc` routes gRPC calls to the same application.
"""
