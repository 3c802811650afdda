"""The dialect `vllm_rl`: what trainers that drive vLLM send and expect.

In come its routes to pause, sleep, abort, push weights and generate from token ids, which translate
to the service. Out go replies in vLLM's shapes. Only the table of dialects imports this room.
"""

from tlt_server.frontend.dialects.vllm_rl import generate, operate, weights

ROUTES = [*operate.ROUTES, *weights.ROUTES, *generate.ROUTES]
