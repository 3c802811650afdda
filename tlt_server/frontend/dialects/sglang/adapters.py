"""Routes that load and unload LoRA adapters, as clients of SGLang call them."""

from __future__ import annotations

from tlt_server.errors import Conflict, NotFound, PushFailed, UnsafeChannel, WeightsRefused
from tlt_server.frontend.dialects.sglang.replies import LoadedAdapters, outcome_of
from tlt_server.frontend.dialects.sglang.requests import read
from tlt_server.frontend.dialects.sglang.weight_requests import SglangLoad, SglangUnload
from tlt_server.frontend.http.endpoints import Routes
from tlt_server.frontend.http.fields import AnyFields
from tlt_server.frontend.service import Service

ROUTES = Routes(error_shape=outcome_of, read=read, empty=AnyFields)
REFUSED = (NotFound, Conflict, WeightsRefused, PushFailed)


@ROUTES.post(
    "/load_lora_adapter",
    needs="push-weights",
    example={"lora_name": "math", "lora_path": "adapters/math"},
    raises=REFUSED,
)
async def load(service: Service, asked: SglangLoad) -> LoadedAdapters:
    """Load a LoRA adapter in PEFT's layout from a directory below the weight root, in place of the
    one that has the name. Requests name it as their lora_path.
    """
    report = await service.adapters.load(asked.lora_name, asked.lora_path)
    return LoadedAdapters(report.state.adapters)


@ROUTES.post(
    "/unload_lora_adapter", needs="push-weights", example={"lora_name": "math"}, raises=REFUSED
)
async def unload(service: Service, asked: SglangUnload) -> LoadedAdapters:
    """Unload a LoRA adapter. The reply comes when its last request has ended."""
    report = await service.adapters.unload(asked.lora_name)
    return LoadedAdapters(report.state.adapters)


@ROUTES.post(
    "/load_lora_adapter_from_tensors",
    needs="push-weights",
    engine_fails=False,
    raises=(UnsafeChannel,),
)
async def from_tensors(service: Service) -> LoadedAdapters:
    """Refuse, always: the body is a pickle, and to read a pickle is to run it."""
    raise UnsafeChannel(
        "load_lora_adapter_from_tensors carries pickled tensors, and reading a pickle runs what it "
        "says; write safetensors below the weight root and POST /load_lora_adapter, or push with "
        "POST /update_weights and role adapter"
    )
