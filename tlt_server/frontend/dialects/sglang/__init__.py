"""The dialect `sglang`: requests and replies of trainers that drive SGLang.

Its routes, and bodies that `native` passes to `generate`, translate to the service; replies have
SGLang's shapes. Only `native` and the table of dialects import this room.
"""

from tlt_server.frontend.dialects.sglang import operate, weights

ROUTES = [*operate.ROUTES, *weights.ROUTES]
