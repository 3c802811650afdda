"""The routes of the dialect, except POST /generate, which is `dialects.native`'s."""

from tlt_server.frontend.dialects.sglang import pauses, server, weights

ROUTES = [*server.ROUTES, *pauses.ROUTES, *weights.ROUTES]
