"""What operators do with models while the server runs: put to sleep, wake, add, remove."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any, TypeVar

from fastapi import FastAPI, Request
from pydantic import Field

from fineserve_runtime.config import AddedModel
from fineserve_runtime.server.doorman import ADMIN
from fineserve_runtime.server.errors import ApiError
from fineserve_runtime.server.models import ServedName
from fineserve_runtime.server.parsing import parse
from fineserve_runtime.server.service import Service

T = TypeVar("T")
_MODELS = f"{ADMIN}models"


class AddRequest(AddedModel):
    """A model and its name, which is a part of paths: ``..`` would be another path."""

    model: Annotated[str, Field(pattern=r"^[A-Za-z0-9_:-][A-Za-z0-9_.:-]{0,99}$")]


def add_admin(app: FastAPI, service: Service) -> None:
    @app.post(_MODELS, status_code=201)
    async def add(request: Request) -> dict[str, Any]:
        """Answers when the model is served."""
        asked = parse(AddRequest, request.state.body)
        request.state.gate.leave()  # engines take their time to start
        name, model = asked.model, AddedModel(**asked.model_dump(exclude={"model"}))
        served = await operated(service.operate, lambda: _add(service, name, model))
        return await _answer(service, served.id)

    @app.delete(_MODELS + "/{name}")
    async def remove(name: str) -> dict[str, Any]:
        """Answers when its requests have ended and its memory is free."""
        model = service.model(name).id
        await operated(service.operate, lambda: _remove(service, model))
        return {"model": model, "state": "removed"}

    @app.post(_MODELS + "/{name}/{action}")
    async def act(name: str, action: str) -> dict[str, Any]:
        """Put a model to sleep, once its requests have ended, or wake it. Answers how it is now."""
        model = service.model(name).id
        actions = {"sleep": service.driver.stop, "wake": service.driver.resume}
        if action not in actions:
            raise ApiError(404, f"{action[:100]} is no action; expected {' or '.join(actions)}")
        await operated(service.look, lambda: actions[action](model))
        return await _answer(service, model)


def _add(service: Service, name: str, model: AddedModel) -> ServedName:
    if service.roster is None:
        raise ValueError("this server adds no models")
    if name in service.models:
        raise ValueError(f"the model {name} is served already")
    served = service.roster.add(name, model)
    service.models = service.models | {name: served}
    service.log("model added", {"model": name})
    return served


def _remove(service: Service, name: str) -> None:
    if service.roster is None:
        raise ValueError("this server removes no models")
    if list(service.models) == [name]:
        raise ValueError(f"{name} is the only model of this server")
    try:
        service.roster.remove(name)
    except RuntimeError:  # an engine of it does not end; nobody is led there any more
        _forget(service, name)
        raise
    _forget(service, name)


def _forget(service: Service, name: str) -> None:
    service.models = {each: served for each, served in service.models.items() if each != name}
    service.log("model removed", {"model": name})


async def operated(run: Callable[[Callable[[], T]], Awaitable[T]], function: Callable[[], T]) -> T:
    """What the function gives, which ``run`` runs. Raises ApiError for what cannot be done (409), or did not work (503)."""
    try:
        return await run(function)
    except ValueError as problem:
        raise ApiError(409, str(problem), code="conflict", reason="operator") from None
    except RuntimeError as problem:
        raise ApiError(503, str(problem), kind="server_error", code="failed", reason="operator") from None


async def _answer(service: Service, model: str) -> dict[str, Any]:
    health = await service.look(lambda: service.driver.health(model))
    return {"model": model, "state": health.condition}
