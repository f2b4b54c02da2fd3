"""The server in time: a port of its own, requests until SIGTERM or Ctrl-C, then those that are here to their end."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn

from fineserve_runtime.server.app import create_app
from fineserve_runtime.server.service import Service


def bind(host: str, port: int) -> socket.socket:
    """The server's socket. Raises OSError, for people, when the port is taken: a second server refuses to start."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
        bound.listen(2048)
    except OSError as problem:
        bound.close()
        raise OSError(f"{host}:{port} cannot be served: {problem.strerror}; is another server running?") from None
    return bound


class DrainingServer(uvicorn.Server):
    """At the first signal new requests are refused and the others go on; at the second, or after ``drain_s``, all end."""

    def __init__(self, service: Service, drain_s: float) -> None:
        self._service = service
        config = uvicorn.Config(
            create_app(service),
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=max(1, round(drain_s)),
        )
        super().__init__(config)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._service.log("draining", {"signal": sig})
        self._service.driver.begin_drain()
        super().handle_exit(sig, frame)


def serve(service: Service, bound: socket.socket, drain_s: float) -> None:
    """Until a signal comes and the last request ended, or ``drain_s`` later. Call it from the main thread."""
    server = DrainingServer(service, drain_s)
    with _signals_spent():
        asyncio.run(server.serve(sockets=[bound]))
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
    """Uvicorn raises the signal that stopped it again for whoever handled it before; there is still a region to remove, so
    that must not end the process."""
    signals = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(each, lambda *_: None) for each in signals]
    try:
        yield
    finally:
        for each, handler in zip(signals, before, strict=True):
            signal.signal(each, handler)
