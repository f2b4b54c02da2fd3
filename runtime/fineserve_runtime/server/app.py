"""The endpoints, on FastAPI."""

from __future__ import annotations

import asyncio
import hmac
import time
import uuid
from collections.abc import Awaitable
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fineserve_runtime import __version__
from fineserve_runtime.jobs import Limits
from fineserve_runtime.server.answers import Ask, EventStream, chat_ask, completion_ask, whole
from fineserve_runtime.server.errors import ApiError
from fineserve_runtime.server.schema import ChatRequest, CompletionRequest, TokenizeRequest
from fineserve_runtime.server.service import ServedName, Service

T = TypeVar("T")
_WRONG_KEY = ApiError(401, "wrong or missing API key", code="invalid_api_key")
TTFT_HEADER = "x-slo-ttft-ms"
TPOT_HEADER = "x-slo-tpot-ms"
_OPEN = ("/health", "/ready", "/version", "/metrics")
"""Paths that need no API key."""


def create_app(service: Service) -> FastAPI:
    app = FastAPI(title="FineServe", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Doorman, service=service)
    _add_errors(app)
    _add_status(app, service)
    _add_models(app, service)
    _add_generation(app, service)
    return app


class Doorman:
    """ASGI middleware: every request has an id, the client's or ours, a line in the log, and the right key."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = headers.get("x-request-id") or uuid.uuid4().hex
        scope.setdefault("state", {})["id"] = request_id
        facts: dict[str, object] = {"id": request_id, "method": scope["method"], "path": scope["path"]}
        begun_s = time.monotonic()

        async def send_marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
                facts.update(status=message["status"], answered_after_s=round(time.monotonic() - begun_s, 6))
            await send(message)

        app = self._app if self._may_enter(scope["path"], headers) else _answer(_WRONG_KEY)
        try:
            await app(scope, receive, send_marked)
        finally:
            self._service.log("request", facts | {"took_s": round(time.monotonic() - begun_s, 6)})

    def _may_enter(self, path: str, headers: Headers) -> bool:
        key = self._service.api_key
        if key is None or path in _OPEN:
            return True
        scheme, _, given = headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), key.encode())


def _answer(problem: ApiError) -> JSONResponse:
    return JSONResponse(problem.body, problem.status, problem.headers)


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def api_error(_: Request, problem: ApiError) -> Response:
        return _answer(problem)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, problem: RequestValidationError) -> Response:
        first = problem.errors()[0]
        if first["type"] == "json_invalid":
            return _answer(ApiError(400, f"the body is no JSON: {first.get('ctx', {}).get('error', first['msg'])}"))
        param = ".".join(str(part) for part in first["loc"] if part != "body") or None
        return _answer(ApiError(400, f"{param or 'body'}: {first['msg']}", param=param))

    @app.exception_handler(HTTPException)
    async def http(_: Request, problem: HTTPException) -> Response:
        return _answer(ApiError(problem.status_code, str(problem.detail)))


def _add_status(app: FastAPI, service: Service) -> None:
    @app.get("/health")
    async def health() -> Response:
        """The server lives."""
        return Response()

    @app.get("/ready")
    async def ready() -> Response:
        """It takes requests."""
        return Response(status_code=503 if service.driver.draining else 200)

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__, **service.versions}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _add_models(app: FastAPI, service: Service) -> None:
    created = int(time.time())

    def entry(model: ServedName) -> dict[str, Any]:
        owner = {"object": "model", "created": created, "owned_by": "fineserve"}
        limits = {"ttft_slo_s": model.limits.ttft_s, "tpot_slo_s": model.limits.tpot_s}
        return {"id": model.id, **owner, "max_model_len": model.max_model_len, **limits}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [entry(model) for model in service.models.values()]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        return entry(service.model(name))

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        served = service.model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "give either prompt or messages", param="prompt")
        if body.prompt is not None:
            tokens = served.tokenizer.encode(body.prompt, special=body.add_special_tokens)
        else:
            tokens = served.tokenizer.chat([message.plain() for message in body.messages or []])
        return {"count": len(tokens), "max_model_len": served.max_model_len, "tokens": tokens}


def _add_generation(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        model = service.model(body.model)
        return await _generate(service, request, completion_ask(body, model, request.state.id, _limits(request, model)))

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        model = service.model(body.model)
        return await _generate(service, request, chat_ask(body, model, request.state.id, _limits(request, model)))


def _limits(request: Request, model: ServedName) -> Limits:
    """The request's own limits where it has them, else its model's."""
    ttft_s, tpot_s = _seconds(request, TTFT_HEADER), _seconds(request, TPOT_HEADER)
    return Limits(ttft_s or model.limits.ttft_s, tpot_s or model.limits.tpot_s)


def _seconds(request: Request, header: str) -> float | None:
    """Raises ApiError unless the header, if it is there, is a positive number of milliseconds."""
    given = request.headers.get(header)
    if given is None:
        return None
    try:
        seconds = float(given) / 1000
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ApiError(400, f"{header} is {given!r}; give a positive number of milliseconds", param=header)
    return seconds


async def _generate(service: Service, request: Request, ask: Ask) -> Response:
    choices = service.choose(ask.orders)
    if ask.stream:
        events = await _unless_gone(request, EventStream(ask, choices).begin())
        return StreamingResponse(events, media_type="text/event-stream")
    return JSONResponse(await _unless_gone(request, whole(ask, choices)))


async def _unless_gone(request: Request, work: Awaitable[T]) -> T:
    """What ``work`` gives; cancelled, which aborts its requests, when the client goes away (ApiError, for nobody)."""
    task = asyncio.ensure_future(work)
    try:
        while True:
            done, _ = await asyncio.wait([task], timeout=_LOOK_S)
            if done:
                return task.result()
            if await request.is_disconnected():
                raise ApiError(499, "the client closed the connection")
    finally:
        task.cancel()


_LOOK_S = 0.1
"""So often a waiting request looks whether its client is still there."""
