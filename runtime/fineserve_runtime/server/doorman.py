"""The checks that every request passes first, on every path."""

from __future__ import annotations

import asyncio
import time
import uuid

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fineserve_runtime.server.errors import ApiError
from fineserve_runtime.server.limits import HttpLimits
from fineserve_runtime.server.service import Key, Service

_WRONG_KEY = ApiError(401, "wrong or missing API key", code="invalid_api_key", reason="key")
_OPEN = ("/health", "/ready", "/version", "/metrics")
"""Paths that need no API key."""

ADMIN = "/admin/"
"""Paths of operators, with a key of their own."""

_ID_CHARS = 128


_TAKEN_IN = 16
"""So many requests are understood at a time. The others wait here, where they cost the event loop nothing: a burst of
requests would otherwise keep it from everything else."""


class Gate:
    """The place of one request among those that are taken in; ``leave`` may be called again."""

    def __init__(self, places: asyncio.Semaphore) -> None:
        self._places: asyncio.Semaphore | None = places

    def leave(self) -> None:
        if self._places is not None:
            self._places.release()
            self._places = None


_TWO_LENGTHS = ApiError(
    400,
    "the request has both Transfer-Encoding and Content-Length; send one",
    code="bad_http",
    reason="bad_http",
    headers={"Connection": "close"},
)
"""A proxy in between may go by the other one, and take for a body what is a request here: the connection is closed."""


class Doorman:
    """ASGI middleware: every request has an id, the client's or ours, a line in the log, and the right key. What goes wrong
    is answered in OpenAI's shape. ``/health`` is answered here, before anything that waits. Bodies are read here, into
    ``request.state.body``; with them, requests pass a gate in the order in which they came (``request.state.came_s``, on the
    monotonic clock), whose place ``request.state.gate`` gives back."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service
        self._places = asyncio.Semaphore(_TAKEN_IN)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        names = [name for name, _ in scope["headers"]]
        if b"transfer-encoding" in names and b"content-length" in names:
            await answer(self._service, _TWO_LENGTHS)(scope, receive, send)
            return
        if scope["path"] == "/health":
            await self._health(scope["method"])(scope, receive, send)
            return
        await _Passage(self._app, self._service, scope, self._places).go(receive, send)

    def _health(self, method: str) -> Response:
        if method not in ("GET", "HEAD"):
            problem = ApiError(405, "/health: Method Not Allowed", code="bad_method", headers={"Allow": "GET, HEAD"})
            return answer(self._service, problem)
        return Response(status_code=200 if self._service.driver.sound else 503)


class _Passage:
    """One request on its way through."""

    def __init__(self, app: ASGIApp, service: Service, scope: Scope, places: asyncio.Semaphore) -> None:
        self._app = app
        self._service = service
        self._scope = scope
        self._places = places
        self._headers = Headers(scope=scope)
        self._id = _request_id(self._headers)
        self._begun_s = time.monotonic()
        self._facts: dict[str, object] = {"id": self._id, "method": scope["method"], "path": scope["path"][:256]}

    async def go(self, receive: Receive, send: Send) -> None:
        async def send_marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = self._id
                self._facts.update(status=message["status"], answered_after_s=self._passed_s())
            await send(message)

        state = self._scope.setdefault("state", {})
        state["id"] = self._id
        try:
            state["key"] = self._enter()
            if self._scope["method"] == "POST":
                state["body"] = await read_body(Request(self._scope, receive), self._service.limits)
                await self._pass_gate(receive, send_marked)
            else:
                await self._app(self._scope, receive, send_marked)
        except ApiError as problem:
            await self._answer(problem, receive, send_marked)
        except Exception as problem:
            self._service.metrics.incident("internal error", {})
            self._service.log("internal error", {"where": "server", "id": self._id, "reason": repr(problem)})
            await self._answer(ApiError(500, "internal error", kind="server_error"), receive, send_marked)
        finally:
            self._service.log("request", self._facts | {"took_s": self._passed_s()})

    async def _pass_gate(self, receive: Receive, send: Send) -> None:
        self._scope["state"]["came_s"] = time.monotonic()
        await self._places.acquire()
        gate = self._scope["state"]["gate"] = Gate(self._places)
        try:
            await self._app(self._scope, receive, send)
        finally:
            gate.leave()

    async def _answer(self, problem: ApiError, receive: Receive, send: Send) -> None:
        if "status" not in self._facts:
            await answer(self._service, problem)(self._scope, receive, send)

    def _enter(self) -> Key | None:
        """Raises ApiError without the right key."""
        scheme, _, given = self._headers.get("authorization", "").partition(" ")
        given = (
            given.strip() if scheme.lower() == "bearer" else self._headers.get("x-api-key", "")
        )  # Anthropic's clients
        if self._scope["path"].startswith(ADMIN):
            if self._service.admin_secret is None:
                raise ApiError(404, "there is no admin API without runtime.admin_key_env", reason="404")
            if not self._service.may_administrate(given):
                raise _WRONG_KEY
            return None
        if not self._service.keys or self._scope["path"] in _OPEN:
            return None
        key = self._service.key(given)
        if key is None:
            raise _WRONG_KEY
        return key

    def _passed_s(self) -> float:
        return round(time.monotonic() - self._begun_s, 6)


def answer(service: Service, problem: ApiError) -> JSONResponse:
    if problem.status != 499:
        service.metrics.http_refused(problem.reason or str(problem.status))
    return JSONResponse(problem.body, problem.status, problem.headers)


def _request_id(headers: Headers) -> str:
    given = headers.get("x-request-id", "")
    return given if 0 < len(given) <= _ID_CHARS and given.isascii() and given.isprintable() else uuid.uuid4().hex


async def read_body(request: Request, limits: HttpLimits) -> bytes:
    """Raises ApiError for a body that is too long or compressed, or does not come."""
    too_long = ApiError(
        413, f"the body is longer than {limits.body_bytes} bytes", code="request_too_large", reason="body"
    )
    encoding = request.headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise ApiError(
            415, f"bodies in {encoding[:100]} are not read; send it as it is", code="unsupported", reason="encoding"
        )
    given = request.headers.get("content-length", "0")
    if not given.isdigit() or int(given) > limits.body_bytes:
        raise too_long
    parts, size = [], 0
    try:
        async with asyncio.timeout(limits.body_s):
            async for part in request.stream():
                size += len(part)
                if size > limits.body_bytes:
                    raise too_long
                parts.append(part)
    except TimeoutError:
        problem = f"the body did not come in {limits.body_s:g} s"
        raise ApiError(408, problem, code="timeout", reason="slow_body") from None
    except ClientDisconnect:
        raise ApiError(499, "the client closed the connection") from None
    return b"".join(parts)
