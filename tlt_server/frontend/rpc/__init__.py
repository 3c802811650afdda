"""gRPC: another way to the routes. A method is one line of a table (`methods`) over the HTTP
operation that it names.

A call runs through the same application as a request over HTTP (`exchange`), so validation, keys,
limits, errors, logs and metrics are the same by construction; `messages` turns messages into JSON
and back, by the names of their fields. Imported only with `grpc_port`.
"""
