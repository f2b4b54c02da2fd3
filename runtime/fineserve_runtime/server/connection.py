"""Connections of clients that are slow, silent, too many or send no HTTP: each costs nothing but itself."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from fineserve_runtime.server.errors import ApiError
from fineserve_runtime.server.limits import HttpLimits


def guarded(limits: HttpLimits) -> type[H11Protocol]:
    """The protocol of a server with these limits."""
    return type("Guarded", (GuardedProtocol,), {"limits": limits})


class GuardedProtocol(H11Protocol):
    """h11's protocol with limits: connections, bytes of and time for the head of a request, bytes after a body that was
    refused, and time for which a client may leave unread what it is sent. Errors are in OpenAI's shape."""

    limits = HttpLimits()
    _head_timer: asyncio.TimerHandle | None = None
    _unread_timer: asyncio.TimerHandle | None = None
    _ignored_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.limits.connections:
            self._refuse(ApiError(503, "too many connections", code="connections", reason="connections"))
        else:
            self._await_head()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self.conn.their_state is h11.IDLE and _head_size(data) > self.limits.head_bytes:
            self.send_400_response("")
            return
        if self.cycle is not None and self.cycle.response_complete and self.conn.their_state is h11.SEND_BODY:
            self._ignored_bytes += len(data)
            if self._ignored_bytes > _MOST_IGNORED_BYTES:
                self.transport.abort()
                return
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._forget_head()
        elif self._head_timer is None:
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_head()
        self.resume_writing()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The client reads more slowly than it is answered. ``close`` would wait for it, so it is cut."""
        super().pause_writing()
        if self._unread_timer is None:
            self._unread_timer = self.loop.call_later(self.limits.unread_s, self.transport.abort)

    def resume_writing(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP request, or has too long a head."""
        problem = f"no valid HTTP request, or its headers are longer than {self.limits.head_bytes} bytes"
        self._refuse(ApiError(400, problem, code="bad_http"))

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(self.limits.head_s, self._too_slow)

    def _forget_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _too_slow(self) -> None:
        if not self.transport.is_closing():
            self._refuse(ApiError(408, f"no request came in {self.limits.head_s:g} s", code="timeout"))

    def _refuse(self, problem: ApiError) -> None:
        self.transport.write(_response(problem))
        self.transport.close()


_MOST_IGNORED_BYTES = 64 * 2**20
"""A client that was refused may finish its body, so that it reads the answer; no more than this."""


def _head_size(data: bytes) -> int:
    """Bytes of the head of a request that begins in ``data``, as far as they are in it."""
    end = data.find(b"\r\n\r\n")
    return len(data) if end < 0 else end


def _response(problem: ApiError) -> bytes:
    body = json.dumps(problem.body).encode()
    headers: dict[str, Any] = {
        "content-type": "application/json",
        "content-length": len(body),
        "connection": "close",
        **problem.headers,
    }
    lines = [f"HTTP/1.1 {problem.status} Refused", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    return "\r\n".join(lines).encode() + body
