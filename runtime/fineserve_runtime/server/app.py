"""The endpoints, on FastAPI."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from fineserve_runtime import __version__
from fineserve_runtime.jobs import Limits
from fineserve_runtime.server.admin import add_admin
from fineserve_runtime.server.answers import EventStream, whole
from fineserve_runtime.server.asks import Ask, chat_ask, completion_ask
from fineserve_runtime.server.doorman import Doorman, answer
from fineserve_runtime.server.embeddings import EmbeddingsRequest, embeddings_ask, whole_embeddings
from fineserve_runtime.server.errors import ApiError
from fineserve_runtime.server.messages import CountRequest, MessagesRequest, MessageStream, whole_message
from fineserve_runtime.server.models import ServedName
from fineserve_runtime.server.parsing import parse
from fineserve_runtime.server.responses import ResponsesRequest, ResponseStream, whole_response
from fineserve_runtime.server.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
)
from fineserve_runtime.server.service import Key, Moving, Service
from fineserve_runtime.server.streams import Choice
from fineserve_runtime.server.unserved import unserved
from fineserve_runtime.server.whatif import add_whatif

T = TypeVar("T")
TTFT_HEADER = "x-slo-ttft-ms"
TPOT_HEADER = "x-slo-tpot-ms"
_LOOK_S = 0.1
"""So often a waiting request looks whether its client is still there."""


def create_app(service: Service) -> FastAPI:
    off: dict[str, Any] = {"docs_url": None, "redoc_url": None, "openapi_url": None, "redirect_slashes": False}
    app = FastAPI(title="FineServe", version=__version__, **off)
    app.add_middleware(Doorman, service=service)
    _add_errors(app, service)
    _add_status(app, service)
    _add_models(app, service)
    add_admin(app, service)
    add_whatif(app, service)
    _add_generation(app, service)
    return app


def _add_errors(app: FastAPI, service: Service) -> None:
    @app.exception_handler(ApiError)
    async def api_error(_: Request, problem: ApiError) -> Response:
        return answer(service, problem)

    @app.exception_handler(HTTPException)
    async def http(request: Request, problem: HTTPException) -> Response:
        return answer(service, _no_endpoint(request, problem))


def _no_endpoint(request: Request, problem: HTTPException) -> ApiError:
    path = request.url.path
    if problem.status_code != 404:
        return ApiError(problem.status_code, f"{path}: {problem.detail}", code="bad_method", headers=problem.headers)
    why = unserved(path.rstrip("/"))
    if why is not None:
        return ApiError(404, f"{path} is not served: {why}", code="unsupported", reason="404")
    return ApiError(
        404, f"there is no {path[:100]}; docs/runtime.md lists what there is", code="not_found", reason="404"
    )


def _add_status(app: FastAPI, service: Service) -> None:
    @app.api_route("/ready", methods=["GET", "HEAD"])
    async def ready(model: str | None = None) -> Response:
        """It takes requests: 503 while the server drains and when all models, or the one that is asked for, are down."""
        names = list(service.models) if model is None else [service.model(model).id]
        health = await service.look(lambda: {name: service.driver.health(name) for name in names})
        up = not service.driver.draining and any(each.condition != "down" for each in health.values())
        body = {"ready": up, "models": {name: each.condition for name, each in health.items()}}
        return JSONResponse(body, 200 if up else 503)

    @app.api_route("/version", methods=["GET", "HEAD"])
    async def version() -> dict[str, str]:
        return {"version": __version__, **service.versions}

    @app.api_route("/metrics", methods=["GET", "HEAD"])
    async def metrics() -> Response:
        text = await service.look(service.metrics.text)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


def _add_models(app: FastAPI, service: Service) -> None:
    created = int(time.time())

    def entry(model: ServedName) -> dict[str, Any]:
        owner = {"object": "model", "created": created, "owned_by": "fineserve"}
        limits = {"ttft_slo_s": model.limits.ttft_s, "tpot_slo_s": model.limits.tpot_s}
        state = {"state": service.driver.health(model.id).condition}
        return {"id": model.id, **owner, "max_model_len": model.max_model_len, **limits, **state}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        data = await service.look(lambda: [entry(model) for model in service.models.values()])
        return {"object": "list", "data": data}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        found = service.model(name)
        return await service.look(lambda: entry(found))

    @app.post("/tokenize")
    async def tokenize(request: Request) -> dict[str, Any]:
        return await service.work(lambda: _tokenize(service, parse(TokenizeRequest, request.state.body)))

    @app.post("/detokenize")
    async def detokenize(request: Request) -> dict[str, Any]:
        return await service.work(lambda: _detokenize(service, parse(DetokenizeRequest, request.state.body)))


def _tokenize(service: Service, body: TokenizeRequest) -> dict[str, Any]:
    served = service.model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give either prompt or messages", param="prompt")
    if body.prompt is not None:
        served.check_length(len(body.prompt), "prompt")
        tokens = served.tokenizer.encode(body.prompt, special=body.add_special_tokens)
    else:
        tokens = served.chat(body.messages or (), {"add_generation_prompt": body.add_generation_prompt})
    strings = [served.tokenizer.decode([token], special=True) for token in tokens] if body.return_token_strs else None
    return {"count": len(tokens), "max_model_len": served.max_model_len, "tokens": tokens, "token_strs": strings}


def _detokenize(service: Service, body: DetokenizeRequest) -> dict[str, Any]:
    served = service.model(body.model)
    if len(body.tokens) > served.max_model_len:
        raise served.too_long(f"there are {len(body.tokens)}", "tokens")
    served.check_ids(body.tokens, "tokens")
    return {"prompt": served.tokenizer.decode(body.tokens, special=True)}


# --- generation --------------------------------------------------------------------------------------------------------


class Understood(NamedTuple):
    """A request, and how its answer is told: at once, or by events."""

    ask: Ask
    whole: Callable[[Sequence[Choice]], Awaitable[dict[str, Any]]]
    events: Callable[[Sequence[Choice]], EventStream]


def _completion(service: Service, request: Request, raw: bytes) -> Understood:
    body = parse(CompletionRequest, raw)
    model, limits = _meant(service, request, body)
    ask = completion_ask(body, model, request.state.id, limits, service.limits)
    return Understood(ask, partial(whole, ask), partial(EventStream, ask))


def _chat(service: Service, request: Request, raw: bytes) -> Understood:
    body = parse(ChatRequest, raw)
    model, limits = _meant(service, request, body)
    ask = chat_ask(body, model, request.state.id, limits, service.limits)
    return Understood(ask, partial(whole, ask), partial(EventStream, ask))


def _response(service: Service, request: Request, raw: bytes) -> Understood:
    asked = parse(ResponsesRequest, raw)
    body = asked.as_chat()
    model, limits = _meant(service, request, body)
    ask = replace(chat_ask(body, model, request.state.id, limits, service.limits), id=f"resp_{request.state.id}")
    return Understood(ask, partial(whole_response, asked, ask), partial(ResponseStream, asked, ask))


def _message(service: Service, request: Request, raw: bytes) -> Understood:
    body = parse(MessagesRequest, raw).as_chat()
    model, limits = _meant(service, request, body)
    ask = replace(chat_ask(body, model, request.state.id, limits, service.limits), id=f"msg_{request.state.id}")
    return Understood(ask, partial(whole_message, ask), partial(MessageStream, ask))


def _embeddings(service: Service, request: Request, raw: bytes) -> Understood:
    body = parse(EmbeddingsRequest, raw)
    model = service.model(body.model)
    ask = embeddings_ask(body, model, request.state.id, _limits(request, model), service.limits)
    return Understood(ask, partial(whole_embeddings, body, ask), partial(EventStream, ask))


_GENERATES = {
    "/v1/completions": _completion,
    "/v1/chat/completions": _chat,
    "/v1/responses": _response,
    "/v1/messages": _message,
    "/v1/embeddings": _embeddings,
}


def _add_generation(app: FastAPI, service: Service) -> None:
    for path, understand in _GENERATES.items():
        app.post(path)(_generating(service, understand))

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(request: Request) -> dict[str, int]:
        def count() -> int:
            body = parse(CountRequest, request.state.body).as_chat()
            model, limits = _meant(service, request, body)
            return chat_ask(body, model, request.state.id, limits, service.limits).prompt_tokens

        return {"input_tokens": await service.work(count)}


def _generating(
    service: Service, understand: Callable[[Service, Request, bytes], Understood]
) -> Callable[[Request], Awaitable[Response]]:
    """The handler of a path whose requests ``understand`` reads."""

    async def generate(request: Request) -> Response:
        return await _generate(service, request, partial(understand, service, request))

    return generate


def _meant(service: Service, request: Request, body: GenerationRequest) -> tuple[ServedName, Limits]:
    """The model, and the request's own limits where it has them, else its model's. Raises ApiError."""
    model = service.model(body.model)
    model.check_answers(embeds=False)
    key: Key | None = request.state.key
    if body.priority and key is not None and not key.priority:
        problem = f"the key {key.name} may not set a priority"
        raise ApiError(403, problem, kind="permission_error", param="priority", reason="priority")
    return model, _limits(request, model)


def _limits(request: Request, model: ServedName) -> Limits:
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


async def _generate(service: Service, request: Request, understand: Callable[[bytes], Understood]) -> Response:
    """Read, understand and submit on a worker thread; then answer as pieces come."""
    loop = asyncio.get_running_loop()
    with ExitStack() as stack:
        stack.enter_context(service.within_limits(request.state.key))

        def submit(held_s: float) -> tuple[Understood, list[Choice]]:
            understood, came_s = understand(request.state.body), request.state.came_s
            marks = {"trace": request.headers.get("traceparent"), "came_s": came_s, "held_s": held_s}
            return understood, service.choose([order._replace(**marks) for order in understood.ask.orders], loop)

        understood, choices = await _settled(service, request, submit)
        del request.state.body  # it may be large, and the answer take a while
        request.state.gate.leave()
        if not understood.ask.stream:
            return JSONResponse(await _unless_gone(request, understood.whole(choices)))
        stream = understood.events(choices)
        return _Stream(stream, await _unless_gone(request, stream.begin()), stack.pop_all())


async def _settled(service: Service, request: Request, submit: Callable[[float], T]) -> T:
    """The result of ``submit`` on a worker thread. A request waits here while its model moves, outside the gate, so that
    other requests pass. ``submit`` gets the seconds that it waited so."""
    held_s = 0.0
    while True:
        try:
            return await service.work(partial(submit, held_s))
        except Moving as where:
            request.state.gate.leave()
            begun_s = time.monotonic()
            while where.model in service.moving:
                await asyncio.sleep(_LOOK_S)
            held_s += time.monotonic() - begun_s


class _Stream(StreamingResponse):
    """The events of ``stream``, within ``limits`` until the last. However it ends, the stream is given up: a client may leave
    before the first event is asked for, and a generator that never began has nothing to run at its end."""

    def __init__(self, stream: EventStream, events: AsyncIterator[str], limits: AbstractContextManager[object]) -> None:
        super().__init__(_in_turns(events), media_type="text/event-stream")
        self._stream, self._limits = stream, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._limits:
            try:
                await super().__call__(scope, receive, send)
            finally:
                self._stream.give_up()


async def _in_turns(events: AsyncIterator[str]) -> AsyncIterator[str]:
    """One a turn of the event loop, for any backlog. Others get their turns, and a client that is gone is heard before more is
    written."""
    async for event in events:
        yield event
        await asyncio.sleep(0)


async def _unless_gone(request: Request, work: Awaitable[T]) -> T:
    """The result of ``work``. It is cancelled, which aborts its requests, when the client goes away (ApiError, which no client
    gets)."""
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
