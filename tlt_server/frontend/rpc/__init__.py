"""gRPC, another transport to the same application. A method is one line of a table (`methods`),
which names its HTTP operation.

`messages` turns gRPC messages into JSON, and replies into messages. A call runs through the
application as a request over HTTP does (`exchange`), so validation, keys, limits, errors, logs and
metrics are the same by construction. Only `build` imports this room, and only with `grpc_port`.
"""
