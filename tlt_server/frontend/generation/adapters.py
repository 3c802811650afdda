"""The check of a request's LoRA adapter."""

from __future__ import annotations

from tlt_server.errors import NotFound
from tlt_server.frontend.http.fields import shown
from tlt_server.wire.events import EngineInfo


def check_adapter(field: str, name: str, info: EngineInfo) -> None:
    """`NotFound` unless the adapter is loaded, or none is asked for. `field`: what the name of the
    field begins with.
    """
    if name and name not in info.adapters:
        raise NotFound(
            f"{field}lora is {shown(name)}; loaded: {shown(', '.join(info.adapters) or 'none')}. "
            "Load it first (POST /update_weights with role adapter, /v1/load_lora_adapter, "
            "/load_lora_adapter)"
        )
