"""The routes of the dialect, by file."""

from tlt_server.frontend.dialects.openai import completions, models, tokens

ROUTES = [*models.ROUTES, *completions.ROUTES, *tokens.ROUTES]
