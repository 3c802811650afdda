"""The names that a request may give as its model: those of the model, and its LoRA adapters. A body
with such a name is read only if the server can answer.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from tlt_server.errors import NotFound
from tlt_server.frontend.http.auth import caller_of
from tlt_server.frontend.http.endpoints import read_given
from tlt_server.frontend.http.fields import shown
from tlt_server.frontend.link.admission import Demand
from tlt_server.frontend.service import Service


async def generating(service: Service, kind: Any, request: Request) -> Any:
    """Read the body of a generating request. `Unavailable` if the server could not answer it
    now.
    """
    service.engine.check_available()
    await request.body()
    service.engine.check_available()  # again, since reading the body may take long
    # Checked before a large body is parsed.
    service.engine.check_room(Demand(sequences=1, owner=caller_of(request).name))
    return await _read(service, kind, request)


async def running(service: Service, kind: Any, request: Request) -> Any:
    """Read the body of a request that only needs the tokenizer; a pause or sleep does not
    matter.
    """
    service.engine.check_running()
    await request.body()
    service.engine.check_running()
    return await _read(service, kind, request)


async def _read(service: Service, kind: Any, request: Request) -> Any:
    asked = await read_given(service, kind, request)
    adapter_of(service, asked.model)
    return asked


def unknown(service: Service, name: str) -> NotFound:
    info, served = service.engine.info, service.config.served_model_name
    adapters = ", ".join(info.adapters) if info is not None else ""
    return NotFound(
        f"model is {name[:100]!r}; this server serves {served!r}: name that one, or none"
        + (f", or one of its LoRA adapters ({shown(adapters)})" if adapters else "")
    )


def adapter_of(service: Service, model: str) -> str:
    """Return the LoRA adapter that a request names as its model; empty for the model itself.
    `NotFound` for another name.
    """
    info = service.engine.info
    if info is not None and model in info.adapters:
        return model
    if model not in ("", service.config.served_model_name, str(service.config.model)):
        raise unknown(service, model)
    return ""


def named(service: Service, model: str) -> str:
    """Return the adapter or model that computes a request with this model name."""
    return adapter_of(service, model) or service.config.served_model_name
