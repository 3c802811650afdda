"""Dialects, each a file or a folder and one line of the table: the routes that clients call.

A handler translates an HTTP request in a client's terms for the service, and returns a reply in the
same terms. `app` serves the tables, and `rpc` knows the paths; nothing else calls them.
"""

from __future__ import annotations

from tlt_server.registry import Registry

DIALECTS = Registry(
    "dialect",
    {
        "areal": "tlt_server.frontend.dialects.areal:ROUTES",
        "native": "tlt_server.frontend.dialects.native:ROUTES",
        "openai": "tlt_server.frontend.dialects.openai.routes:ROUTES",
        "rollouts": "tlt_server.frontend.dialects.native:ROLLOUTS",
        "engine": "tlt_server.frontend.dialects.operate:ENGINE",
        "fleet": "tlt_server.frontend.dialects.fleet:ROUTES",
        "events": "tlt_server.frontend.dialects.operate:EVENTS",
        "operate": "tlt_server.frontend.dialects.operate:ROUTES",
        "page": "tlt_server.frontend.dialects.page:ROUTES",
        "sglang": "tlt_server.frontend.dialects.sglang:ROUTES",
        "drafter": "tlt_server.frontend.dialects.drafter:ROUTES",
        "drafter_exchange": "tlt_server.frontend.dialects.drafter_exchange:ROUTES",
        "strategy": "tlt_server.frontend.dialects.strategy:ROUTES",
        "vllm_rl": "tlt_server.frontend.dialects.vllm_rl:ROUTES",
        "weights": "tlt_server.frontend.dialects.weights.routes:ROUTES",
        "weight_files": "tlt_server.frontend.dialects.weights.files:ROUTES",
    },
)
