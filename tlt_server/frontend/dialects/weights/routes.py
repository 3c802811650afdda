"""The routes of the dialect."""

from tlt_server.frontend.dialects.weights import groups, parts, pushes

ROUTES = [*pushes.ROUTES, *groups.ROUTES, *parts.ROUTES]
