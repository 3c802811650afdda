"""The names that a request may give as its model: those of the model, and its LoRA adapters."""

from __future__ import annotations

from tlt_server.errors import NotFound
from tlt_server.frontend.http.fields import shown
from tlt_server.frontend.service import Service


def unknown(service: Service, name: str) -> NotFound:
    info, served = service.engine.info, service.config.served_model_name
    adapters = ", ".join(info.adapters) if info is not None else ""
    return NotFound(
        f"model is {name[:100]!r}; this server serves {served!r}: name that one, or none"
        + (f", or one of its LoRA adapters ({shown(adapters)})" if adapters else "")
    )


def adapter_of(service: Service, model: str) -> str:
    """Return the LoRA adapter that a request names as its model; empty for the model itself.
    `NotFound` where it is neither.
    """
    info = service.engine.info
    if info is not None and model in info.adapters:
        return model
    if model not in ("", service.config.served_model_name, str(service.config.model)):
        raise unknown(service, model)
    return ""


def named(service: Service, model: str) -> str:
    """Return the name of what computes a request that names this model."""
    return adapter_of(service, model) or service.config.served_model_name
