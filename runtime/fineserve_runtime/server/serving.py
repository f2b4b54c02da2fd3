"""The server in time: a port of its own, requests until SIGTERM or Ctrl-C, then those that are here to their end."""

from __future__ import annotations

import asyncio
import errno
import math
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import uvicorn

from fineserve_runtime.server.app import create_app
from fineserve_runtime.server.connection import guarded
from fineserve_runtime.server.garbage import CalmGarbage
from fineserve_runtime.server.service import Service

_LAST_WORDS_S = 5
"""So long clients have to read how their requests ended before their connections are cut."""

_LOOK_S = 0.1

_TAKEN_AT_ONCE = 64
"""Connections that are taken in one turn of the event loop; more wait in the kernel's queue, of ``_BACKLOG``."""

_BACKLOG = 2048


class Tls(NamedTuple):
    certificate: Path
    key: Path


def bind(host: str, port: int) -> socket.socket:
    """The server's socket. Raises OSError, for people, when the port is taken: a second server refuses to start."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
        bound.listen(_BACKLOG)
    except OSError as problem:
        bound.close()
        hint = "; is another server running?" if problem.errno == errno.EADDRINUSE else ""
        raise OSError(f"{host}:{port} cannot be served: {problem.strerror}{hint}") from None
    return bound


class DrainingServer(uvicorn.Server):
    """At the first signal new requests are refused and the others go on, for ``drain_s`` at most. Then, or at a second signal,
    all end with an error. The server stops once that is told."""

    def __init__(self, service: Service, drain_s: float, tls: Tls | None = None) -> None:
        self._service = service
        self._drain_s = drain_s
        self._ended = threading.Event()
        config = uvicorn.Config(
            create_app(service),
            http=guarded(service.limits, service.metrics.http_refused),
            h11_max_incomplete_event_size=service.limits.head_bytes,
            ws="none",
            log_config=None,
            access_log=False,
            lifespan="off",
            backlog=_TAKEN_AT_ONCE,
            timeout_keep_alive=math.ceil(service.limits.silent_s),
            timeout_graceful_shutdown=_LAST_WORDS_S,
            ssl_certfile=tls and tls.certificate,
            ssl_keyfile=tls and tls.key,
        )
        super().__init__(config)

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        with CalmGarbage() as self._garbage:
            await super().serve(sockets)

    async def on_tick(self, counter: int) -> bool:
        """Uvicorn's clock, ten times a second."""
        self._garbage.tick(busy=bool(self.server_state.tasks))
        return await super().on_tick(counter)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for each in sockets or ():
            each.listen(_BACKLOG)  # asyncio made the kernel's queue as short as a turn

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._service.log("draining", {"signal": sig})
        if self._service.driver.draining:
            self._ended.set()
            return
        self._service.driver.begin_drain(self._drain_s)
        threading.Thread(target=self._drain, name="drain", daemon=True).start()

    def _drain(self) -> None:
        """A thread: to wait for the last request, a second signal, or the end of patience."""
        end_s = time.monotonic() + self._drain_s
        while not self._ended.is_set() and time.monotonic() < end_s:
            if self._service.driver.wait_empty(_LOOK_S):
                break
        self._service.driver.end_all()
        self.should_exit = True


def serve(service: Service, bound: socket.socket, drain_s: float, tls: Tls | None = None) -> None:
    """Until a signal comes and the last request ended, or ``drain_s`` later. Call it from the main thread."""
    server = DrainingServer(service, drain_s, tls)
    try:
        with _signals_spent():
            asyncio.run(server.serve(sockets=[bound]))
    finally:
        service.close()
    service.log("stopped", {})


@contextmanager
def exits_on_sigterm() -> Iterator[None]:
    """SIGTERM unwinds the stack, so that engines half started are stopped and the region is removed."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _signals_spent() -> Iterator[None]:
    """Uvicorn raises the signal that stopped it again for the handler before it; there is still a region to remove, so
    that must not end the process."""
    signals = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(each, lambda *_: None) for each in signals]
    try:
        yield
    finally:
        for each, handler in zip(signals, before, strict=True):
            signal.signal(each, handler)
