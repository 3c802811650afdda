"""The routes of the dialect."""

from tlt_server.frontend.dialects.vllm_rl import generate, operate, weights

ROUTES = [*operate.ROUTES, *weights.ROUTES, *generate.ROUTES]
