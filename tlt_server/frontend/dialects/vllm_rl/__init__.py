"""The dialect `vllm_rl`: requests and replies of trainers that drive vLLM.

Its routes to pause, sleep, abort, push weights and generate from token ids translate to the
service; replies have vLLM's shapes. Only the table of dialects imports this room.
"""

from tlt_server.frontend.dialects.vllm_rl import generate, operate, weights

ROUTES = [*operate.ROUTES, *weights.ROUTES, *generate.ROUTES]
