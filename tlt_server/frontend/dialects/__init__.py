"""Dialects: what existing clients send. One file each, one table line each.

A dialect is a function `routes(service) -> list[Endpoint]`; it translates to `Validator.batch` and
phrases the events of `Service.generate`.
"""

from __future__ import annotations

from tlt_server.registry import Registry

DIALECTS = Registry(
    "dialect",
    {
        "native": "tlt_server.frontend.dialects.native:routes",
        "openai": "tlt_server.frontend.dialects.openai.routes:routes",
        "rollouts": "tlt_server.frontend.dialects.rollouts:routes",
        "engine": "tlt_server.frontend.dialects.engine:routes",
        "events": "tlt_server.frontend.dialects.events:routes",
        "operate": "tlt_server.frontend.dialects.operate:routes",
        "page": "tlt_server.frontend.dialects.page:routes",
        "sglang": "tlt_server.frontend.dialects.sglang.routes:routes",
        "strategy": "tlt_server.frontend.dialects.strategy:routes",
        "vllm_rl": "tlt_server.frontend.dialects.vllm_rl.routes:routes",
        "weights": "tlt_server.frontend.dialects.weights:routes",
    },
)
