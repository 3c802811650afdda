"""The routes of the dialect."""

from tlt_server.frontend.dialects.vllm_rl import generate, pauses, server, weights

ROUTES = [*pauses.ROUTES, *weights.ROUTES, *generate.ROUTES, *server.ROUTES]
