"""The routes of the dialect, except POST /generate, which is `dialects.native`'s."""

from tlt_server.frontend.dialects.sglang import operate, weights

ROUTES = [*operate.ROUTES, *weights.ROUTES]
