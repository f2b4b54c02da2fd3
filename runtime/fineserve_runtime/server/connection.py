"""Connections of clients that are slow, silent, too many or send no HTTP: each costs nothing but itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from fineserve_runtime.server.errors import ApiError
from fineserve_runtime.server.limits import HttpLimits


def guarded(limits: HttpLimits, count: Callable[[str], None]) -> type[H11Protocol]:
    """The protocol of a server with these limits. ``count`` is told why a connection was refused or closed."""
    return type("Guarded", (GuardedProtocol,), {"limits": limits, "count": staticmethod(count)})


class GuardedProtocol(H11Protocol):
    """h11's protocol with limits: on connections, on bytes of and time for the head of a request, and on both for the rest of
    a body that was answered already. A client may leave what it is sent unread for a limited time. Errors are in OpenAI's
    shape.

    The time for the head begins with its first byte: a client that opens a thousand connections before it sends anything is
    slow, but does nothing wrong.
    """

    limits = HttpLimits()
    _head_timer: asyncio.TimerHandle | None = None
    _head_begun = False
    _unread_timer: asyncio.TimerHandle | None = None
    _rest_timer: asyncio.TimerHandle | None = None
    _ignored_bytes = 0
    _patient_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.limits.connections:
            self._refuse(ApiError(503, "too many connections", code="connections", reason="connections"))
        else:
            self._await_silence()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self.conn.their_state is h11.IDLE and _head_size(data) > self.limits.head_bytes:
            self.send_400_response("")
            return
        if self._is_answered_early:
            self._ignored_bytes += len(data)
            if self._ignored_bytes > _MOST_IGNORED_BYTES:
                self._never_ends()
                return
        super().data_received(data)
        self._await_rest()
        if self.conn.their_state is not h11.IDLE:
            self._forget_head()
        elif not self.conn.trailing_data[0]:
            self._await_silence()  # the body of a request that was answered early has ended
        elif not self._head_begun:
            self._await_head()

    @property
    def _is_answered_early(self) -> bool:
        """Whether the client still sends the body of a request that has its answer."""
        return self.cycle is not None and self.cycle.response_complete and self.conn.their_state is h11.SEND_BODY

    def on_response_complete(self) -> None:
        """Where the body is still to come, it has the time of a body from here on, and not that of a silent client."""
        super().on_response_complete()
        if self._is_answered_early and not self.transport.is_closing():
            self._unset_keepalive_if_required()
            self._await_rest()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_head()
        if self._rest_timer is not None:
            self._rest_timer.cancel()
        self.resume_writing()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The client reads more slowly than it is answered. ``close`` would wait for it, so it is cut."""
        super().pause_writing()
        if self._unread_timer is None:
            self._unread_timer = self.loop.call_later(self.limits.unread_s, self._never_reads)

    def resume_writing(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP request, or has too long a head."""
        problem = f"no valid HTTP request, or its headers are longer than {self.limits.head_bytes} bytes"
        self._refuse(ApiError(400, problem, code="bad_http", reason="bad_http"))

    def _await_head(self) -> None:
        self._forget_head()
        self._head_begun = True
        self._head_timer = self.loop.call_later(self.limits.head_s, self._too_slow)

    def _await_silence(self) -> None:
        self._forget_head()
        self._head_timer = self.loop.call_later(self.limits.silent_s, self._never_spoke)

    def _forget_head(self) -> None:
        self._head_begun = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _await_rest(self) -> None:
        """A client that was answered early has the time of a body for each mebibyte of the rest: if it goes on sending, it is
        to read its answer."""
        if self._is_answered_early and self._rest_timer is not None and self._ignored_bytes < self._patient_bytes:
            return
        if self._rest_timer is not None:
            self._rest_timer.cancel()
            self._rest_timer = None
        if self._is_answered_early:
            self._patient_bytes = self._ignored_bytes + _PROGRESS_BYTES
            self._rest_timer = self.loop.call_later(self.limits.body_s, self._never_ends)

    def _never_ends(self) -> None:
        self.count("ignored_body")
        self.transport.abort()

    def _too_slow(self) -> None:
        if not self.transport.is_closing():
            problem = f"the headers did not come in {self.limits.head_s:g} s"
            self._refuse(ApiError(408, problem, code="timeout", reason="slow_head"))

    def _never_spoke(self) -> None:
        if not self.transport.is_closing():
            self.count("silent")
            self.transport.close()

    def _never_reads(self) -> None:
        self.count("unread")
        self.transport.abort()

    def count(self, reason: str) -> None:
        """Replaced by ``guarded``."""

    def _refuse(self, problem: ApiError) -> None:
        self.count(problem.reason or str(problem.status))
        self.transport.write(_response(problem))
        self.transport.close()


_MOST_IGNORED_BYTES = 64 * 2**20
"""A client that was refused may finish its body, so that it reads the answer; no more than this."""

_PROGRESS_BYTES = 2**20
"""Of a body that nobody reads, what a client must send in the time of a body, to be heard out."""


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
