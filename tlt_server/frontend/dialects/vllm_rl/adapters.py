"""Routes that load and unload LoRA adapters, as clients of vLLM call them."""

from __future__ import annotations

from tlt_server.errors import Conflict, InvalidRequest, NotFound, PushFailed, WeightsRefused
from tlt_server.frontend.dialects.vllm_rl.replies import fault
from tlt_server.frontend.dialects.vllm_rl.requests import VllmLoad, VllmUnload
from tlt_server.frontend.http.endpoints import Routes, Unread
from tlt_server.frontend.http.fields import shown
from tlt_server.frontend.service import Service

ROUTES = Routes(error_shape=fault)
REFUSED = (NotFound, Conflict, WeightsRefused, PushFailed)


@ROUTES.post(
    "/v1/load_lora_adapter",
    needs="push-weights",
    example={"lora_name": "math", "lora_path": "adapters/math"},
    raises=REFUSED,
)
async def load(service: Service, body: Unread[VllmLoad]) -> str:
    """Load a LoRA adapter in PEFT's layout from a directory below the weight root. Requests name it
    as their model.
    """
    service.engine.check_running()
    asked, info = await body.read(), service.engine.info
    if info is not None and asked.lora_name in info.adapters and not asked.load_inplace:
        raise InvalidRequest(
            f"lora_name is {shown(asked.lora_name)}, which is loaded already; send load_inplace "
            "true to replace it, or unload it first"
        )
    await service.adapters.load(asked.lora_name, asked.lora_path)
    return f"Success: LoRA adapter {asked.lora_name!r} added successfully."


@ROUTES.post(
    "/v1/unload_lora_adapter", needs="push-weights", example={"lora_name": "math"}, raises=REFUSED
)
async def unload(service: Service, asked: VllmUnload) -> str:
    """Unload a LoRA adapter. The reply comes when its last request has ended."""
    await service.adapters.unload(asked.lora_name)
    return f"Success: LoRA adapter {asked.lora_name!r} removed successfully."
