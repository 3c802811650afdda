"""Routes that tell which model is served, and under which names."""

from __future__ import annotations

from typing import Annotated

from tlt_server.errors import NotFound
from tlt_server.frontend.dialects.models import unknown
from tlt_server.frontend.dialects.openai.replies import Model, Models, failure
from tlt_server.frontend.dialects.replies.server_info import model_path
from tlt_server.frontend.http.endpoints import Routes
from tlt_server.frontend.http.keys import Caller
from tlt_server.frontend.service import Service

ROUTES = Routes(error_shape=failure)
ModelName = Annotated[str, "a name of the model, as `GET /v1/models` lists it"]


@ROUTES.get("/v1/models", needs="data")
async def models(service: Service, caller: Caller) -> Models:
    """List the names of the served model, with the limit on its prompt plus output.

    A key that may push weights or operate also sees the model's directory, which is a name too.
    """
    return Models([*_models(service, caller).values()])


@ROUTES.get("/v1/models/{name:path}", needs="data", raises=(NotFound,))
async def model(service: Service, caller: Caller, name: ModelName) -> Model:
    """Describe the served model, by one of its names."""
    found = _models(service, caller).get(name)
    if found is None:
        raise unknown(service, name)
    return found


def _models(service: Service, caller: Caller) -> dict[str, Model]:
    info, root = service.engine.info, model_path(service, caller)
    longest = info.max_model_len if info is not None else service.config.max_model_len
    assert isinstance(longest, int)
    served = service.config.served_model_name
    created = service.started_s
    found = {name: Model(name, created, longest, root) for name in (served, root)}
    adapters = info.adapters if info is not None else {}
    return found | {
        name: Model(name, created, longest, version, served)
        for name, version in adapters.items()
        if name not in found
    }
