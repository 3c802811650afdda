"""All routes of the dialect but POST /generate, which `dialects.native` hands to `generate`."""

from tlt_server.frontend.dialects.sglang import pauses, server, weights

ROUTES = [*server.ROUTES, *pauses.ROUTES, *weights.ROUTES]
