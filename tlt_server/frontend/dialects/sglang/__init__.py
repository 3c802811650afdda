"""The dialect `sglang`: what trainers that drive SGLang send and expect.

In come its routes and the bodies that `native` hands to `generate`; both translate to the service.
Out go replies in SGLang's shapes. Only `native` and the table of dialects import this room.
"""

from tlt_server.frontend.dialects.sglang import operate, weights

ROUTES = [*operate.ROUTES, *weights.ROUTES]
