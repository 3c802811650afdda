"""The routes of the dialect, by file."""

from tlt_server.frontend.dialects.openai import completions, models, tokens
from tlt_server.frontend.dialects.openai.responses import routes as responses

ROUTES = [*models.ROUTES, *completions.ROUTES, *tokens.ROUTES, *responses.ROUTES]
